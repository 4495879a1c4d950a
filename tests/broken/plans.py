"""Plans of the strategies here; torch-free, as those of a plugin must be."""

from __future__ import annotations

import attrs

from mtb_core import ConfigError, Layout, Plan


def data_parallel(options, config, world):
    """Every rank holds the model and sees its own samples."""
    return Plan(Layout((("dp", world.size),)))


def copes_with_missing_gradients(options, config, world):
    """A promise."""
    return Plan(Layout((("dp", world.size),)), missing_gradients=True)


def sharded(options, config, world):
    """A promise."""
    return Plan(Layout((("dp", world.size),)), sharded=True)


def last_only(options, config, world):
    """A plan without sync mode "every"."""
    return Plan(Layout((("dp", world.size),)), sync_modes=("last",))


def without_bf16(options, config, world):
    """A plan for fp32."""
    if config.precision != "fp32":
        raise ConfigError(f"--precision {config.precision}: fp32 only.")
    return Plan(Layout((("dp", world.size),)))


def looks_at_devices(options, config, world):
    """Asks torch, which a plan must leave alone."""
    import torch

    return Plan(Layout((("dp", world.size if torch.get_num_threads() else 1),)))


def stages(options, config, world):
    """The ranks are the stages of a pipeline."""
    layout = Layout((("pp", world.size),), {"pp": "stages"})
    return Plan(layout, sync_modes=("last",), least_micro_batches=world.size, custom_models=False)


def first_stage_counts(options, config, world):
    """A pipeline whose first stage, which has no loss, is the one that counts."""
    return attrs.evolve(stages(options, config, world), layout=Layout((("pp", world.size),), {"pp": "copies"}))


def tokens(options, config, world):
    """The ranks share out the positions of each sample."""
    layout = Layout((("cp", world.size),), {"cp": "tokens"})
    return Plan(layout, sync_modes=("last",), custom_models=False)


def tokens_as_copies(options, config, world):
    """Ranks with positions of their own, of which only those of the first count."""
    return attrs.evolve(tokens(options, config, world), layout=Layout((("cp", world.size),), {"cp": "copies"}))


def copies(options, config, world):
    """All ranks do the same."""
    return Plan(Layout((("tp", world.size),), {"tp": "copies"}), sync_modes=("last",))


def copies_as_data(options, config, world):
    """Ranks that sum nothing, with samples of their own."""
    return Plan(Layout((("tp", world.size),), {"tp": "data"}), sync_modes=("last",))


def local_steps(options, config, world):
    """Replicas that differ between synchronisations."""
    return Plan(
        Layout((("dp", world.size),)),
        sync_modes=("last",),
        sums_gradients=False,
        exact=False,
        resharding=False,
    )
