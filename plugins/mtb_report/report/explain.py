"""From a record to an explanation: the rules of its kind, then those for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mtb_report.results import Record

from . import rules_measured, rules_sets
from .findings import Explanation, Finding
from .naming import label_of
from .rules_common import common
from .rules_training import training

_KINDS: dict[str, Callable[[Record], Iterator[Finding]]] = {
    "training": training,
    "communication": rules_measured.communication,
    "moe_routing": rules_measured.moe,
    "memory_pressure": rules_measured.memory_pressure,
    "profile": rules_measured.profile,
    "trace_analysis": rules_measured.profile,
    "checkpoint_verification": rules_measured.checked,
    "conformance": rules_measured.checked,
    "tensor_parallel": rules_measured.checked,
    "tensor_parallel_mlp": rules_measured.checked,
    "sequence_parallel": rules_measured.checked,
    "sweep": rules_sets.sweep,
    "comparison": rules_sets.comparison,
    "fault_tolerance": rules_sets.drill,
    "megatron": rules_sets.megatron,
    "megatron_matrix": rules_sets.megatron,
}


def explained(record: Record) -> Explanation:
    """What the rules say of `record`; of a kind without rules of its own, what holds for all results.

    Of a measurement that is not valid nothing is said that rests on its times, rates or memory, as a table shows ``-``.
    """
    rule = _KINDS.get(record.kind)
    own = list(rule(record)) if rule else []
    if record.performance_valid is False:
        own = [finding for finding in own if not finding.performance]
    return Explanation(f"{label_of(record)}: {record.kind.replace('_', ' ')}", (*own, *common(record)))
