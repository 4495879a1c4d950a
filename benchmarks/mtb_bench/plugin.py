"""The sink ``gate``: how a MiniTrainBench run takes part in the benchmarks, by public hooks alone."""

from __future__ import annotations

from collections.abc import Sequence

from mtb_core import NoOptions, RunInfo, SinkInfo, hookimpl

from .gate import Gate

PLUGIN_API = 2


class GateSink:
    """Waits at the benchmark's `Gate` after every step."""

    def __init__(self, options: NoOptions) -> None:  # noqa: ARG002  (sinks are made with them)
        self._gate: Gate | None = None

    @hookimpl
    def mtb_run_started(self, info: RunInfo) -> None:
        """Meet the conductor."""
        self._gate = Gate(info.ctx.rank)

    @hookimpl
    def mtb_step_recorded(self) -> None:
        """A step has ended."""
        assert self._gate is not None
        self._gate.step_done()


@hookimpl
def mtb_sinks() -> Sequence[SinkInfo]:
    """The sink ``gate``."""
    return [SinkInfo("gate", "Waits at the gate of the benchmarks' conductor.", "mtb_bench.plugin:GateSink")]
