"""Importing DeepSpeed and making its engine, quietly and without building anything."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import nn

from mtb_core import Job, RankContext, RunFailed

from . import private
from .options import DeepSpeedOptions


def import_deepspeed(device: str) -> Any:
    """The package, for `device`, with its messages on stderr instead of stdout.

    Raises:
        RunFailed: it cannot be imported, or was imported for another kind of device.
    """
    kind = device.partition(":")[0]
    try:
        # Its logger takes the stdout that it finds while it is imported.
        with private.no_default_group(), contextlib.redirect_stdout(sys.stderr), _environment(DS_ACCELERATOR=kind):
            import deepspeed  # noqa: PLC0415  (seconds; only where it is used)
            import torch.distributed.nn.functional  # noqa: F401, PLC0415  (DeepSpeed does it, but later)
            from deepspeed.accelerator import get_accelerator  # noqa: PLC0415

            private.import_muon_plainly()
            accelerator = get_accelerator()
    except Exception as error:
        raise RunFailed(
            f"Strategy 'deepspeed' needs DeepSpeed, and importing it raised {type(error).__name__}: {error}. Repair the "
            "installation (`mtb doctor` imports it, too), or use another strategy."
        ) from error
    for handler in logging.getLogger("DeepSpeed").handlers:
        if type(handler) is logging.StreamHandler:  # its own, which no subclass is
            handler.stream = sys.stderr  # setStream flushes the former one, which may be closed by now
    if accelerator.device_name() != kind:
        raise RunFailed(
            f"DeepSpeed was set up for {accelerator.device_name()} in this process, and this run is on {kind}; start it "
            "in a process of its own, without DS_ACCELERATOR."
        )
    # DeepSpeed calls torch's collectives by names that this torch calls old, and nobody here can change that.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    private.without_ops(deepspeed)
    private.count_devices_once(accelerator)
    return deepspeed


def engine_settings(options: DeepSpeedOptions, job: Job) -> dict[str, Any]:
    """The configuration that DeepSpeed gets; `options` are complete.

    Batch sizes only satisfy its checks: losses come in as shares of the global batch. Clipping is core's.
    """
    stage = options.stage
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": options.overlap_comm,
        "reduce_bucket_size": options.reduce_bucket_size,
        "allgather_bucket_size": options.allgather_bucket_size,
        # The norm is core's; DeepSpeed leaves its own out only here.
        "compute_grad_norm": stage not in (1, 2) or options.offload_optimizer != "none",
    }
    for name in ("contiguous_gradients", "reduce_scatter"):
        if getattr(options, name) is not None:
            zero[name] = getattr(options, name)
    for name in ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance"):
        if getattr(options, name) is not None:
            zero[f"stage3_{name}"] = getattr(options, name)
    if options.offload_optimizer != "none":
        zero["offload_optimizer"] = {"device": options.offload_optimizer}
    low_precision = job.config.precision == "bf16" and bool(stage)
    return {
        "train_micro_batch_size_per_gpu": job.config.batch_size,
        "gradient_accumulation_steps": job.accumulation,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": low_precision},
        "data_types": {"grad_accum_dtype": options.grad_accum_dtype},
        "zero_optimization": zero,
    }


@contextlib.contextmanager
def joined(deepspeed: Any, ctx: RankContext) -> Iterator[None]:
    """DeepSpeed works on core's process group, inside; afterwards it has forgotten that, for core will destroy it.

    DeepSpeed reads the local rank from the environment, where it is not if nobody launched this process.
    """
    with _environment(LOCAL_RANK=str(ctx.local_rank)):
        private.lend_group(deepspeed)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                deepspeed.init_distributed(dist_backend=ctx.backend, dist_init_required=False, verbose=False)
            yield
        finally:
            private.take_back_group(deepspeed)


def make_engine(deepspeed: Any, module: nn.Module, optimizer: Any, settings: dict[str, Any]) -> Any:
    """DeepSpeed's engine over a filled module. All ranks, `joined`."""
    with contextlib.redirect_stdout(sys.stderr), private.without_broadcast(deepspeed):
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings, dist_init_required=False)
    # The strategy calls for the reduction itself, after it has looked for parameters without gradient.
    engine.enable_backward_allreduce = False
    return engine


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@attrs.frozen
class Reach:
    """Reach of backward from a loss: ids of parameters, and whether something in the graph hides others.

    Checkpointing in its re-entrant form runs forward again when backward comes to it, and only then has a graph.
    """

    parameters: set[int]
    hides: bool


def reach(loss: torch.Tensor) -> Reach:
    """Find what backward from `loss` will reach.

    DeepSpeed takes gradients out of ``.grad`` and reduces them in buckets; a parameter without one would leave another
    rank's bucket of another size, or, at stage 3, an old gradient in place. So it must be known before backward.
    """
    seen: set[Any] = set()
    found: set[int] = set()
    hides = False
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        hides |= type(node).__name__ == "CheckpointFunctionBackward"
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        waiting.extend(following for following, _ in node.next_functions)
    return Reach(found, hides)
