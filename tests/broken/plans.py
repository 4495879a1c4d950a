"""Plans of the strategies here; torch-free, as those of a plugin must be."""

from __future__ import annotations

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
