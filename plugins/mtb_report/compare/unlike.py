"""In what two results are unlike, and which of it makes their times say nothing about each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from mtb_report.results import Record

#: Another amount or kind of work: times are not comparable.
WORK = "work"
#: Another arithmetic: faster may be less exact.
NUMERICS = "numerics"
#: Another machine, device, software or source.
PLACE = "place"
#: What was to be compared, as a rule.
SETTING = "setting"

#: What decides how much work of which kind a run does; `mtb report` uses the same lists.
WORK_KEYS = (
    "benchmark", "model", "parameters", "seq_length", "vocab_size", "d_model", "n_heads", "n_layers", "qk_norm",
    "tie_embeddings", "data", "global_batch_size", "optimizer",
)  # fmt: skip
NUMERICS_KEYS = ("precision", "reduce_dtype", "compile", "dropout")
_SETTINGS = (
    "strategy", "strategy_options", "world_size", "batch_size_per_rank", "gradient_accumulation_steps",
    "resolved_gradient_sync_mode", "activation_checkpointing", "steps", "warmup_steps", "max_grad_norm", "seed",
    "sink", "save_every", "async_save", "eval_every",
)  # fmt: skip
#: Of the configuration, what is recorded under another name above, or says only where and how often to measure.
_ELSEWHERE = (
    "strategy_opt", "nproc", "nnodes", "batch_size", "grad_accum_steps", "gradient_sync_mode", "run_dir", "output",
    "config", "repeat", "formal", "debug",
)  # fmt: skip
_DEVICE = ("device", "device_name", "backend")
_SOURCE = ("git_revision", "git_dirty", "git_diff_digest", "build_revision", "image_id")
#: Of the environment, what a run sets for itself.
_OWN = ("torch_threads", "variables")


@attrs.frozen
class Difference:
    """One thing in which A and B are unlike.

    Attributes:
        group: `WORK`, `NUMERICS`, `PLACE` or `SETTING`.
        name: the key, with dots inside tables. Of unlike strategies the options are one difference, whose values are
            both tables: what one strategy has no option for is nothing that its file does not say.
        a, b: the values; None where a file does not say.
    """

    group: str
    name: str
    a: Any
    b: Any

    @property
    def decides(self) -> bool:
        """Whether both say it and mean other work, so that their times cannot be compared."""
        return self.group == WORK and self.a is not None and self.b is not None

    def __str__(self) -> str:
        return f"{self.name}: {shown(self.a)} | {shown(self.b)}"


def differences(a: Record, b: Record) -> list[Difference]:
    """Every difference of two results that bears on a comparison; what both do not say is none."""
    out: list[Difference] = []
    groups = ((WORK, WORK_KEYS), (NUMERICS, NUMERICS_KEYS), (PLACE, _DEVICE), (SETTING, _SETTINGS))
    for group, names in groups:
        for name in names:
            pair = _value(a, name), _value(b, name)
            whole = name == "strategy_options" and _value(a, "strategy") != _value(b, "strategy")
            out += [Difference(group, name, *pair)] if whole and pair[0] != pair[1] else _unlike(group, name, *pair)
    configs = [r.get("config") or {} for r in (a, b)]
    if all(configs):  # older files have none: what one of two does not say at all is no difference
        known = {*_ELSEWHERE, *(name for _, names in groups for name in names)}
        for name in sorted({*configs[0], *configs[1]} - known):
            out += _unlike(SETTING, name, configs[0].get(name), configs[1].get(name))
    for name in _SOURCE:
        out += _unlike(PLACE, name, a.provenance.get(name), b.provenance.get(name))
    for group, own in ((PLACE, False), (SETTING, True)):
        left, right = ({k: v for k, v in r.environment.items() if (k in _OWN) is own} for r in (a, b))
        out += _unlike(group, "environment", left, right)
    out += _unlike(PLACE, "plugins", _versions(a), _versions(b))
    return out


def _value(record: Record, name: str) -> Any:
    """A setting, wherever the file has it; older files keep sizes in ``model_config``."""
    if name == "benchmark":
        return record.kind
    for table in (record.values, record.get("config") or {}, record.get("model_config") or {}):
        if table.get(name) is not None:
            return table[name]
    return None


def _versions(record: Record) -> dict[str, Any]:
    return {str(p.get("name")): p.get("version") for p in record.get("plugins") or ()}


def _unlike(group: str, name: str, a: Any, b: Any) -> Iterator[Difference]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted({*a, *b}, key=str):
            yield from _unlike(group, f"{name}.{key}", a.get(key), b.get(key))
    elif a != b:
        yield Difference(group, name, a, b)


def shown(value: Any) -> str:
    """A value of a difference, for people."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={'none' if x is None else x}" for key, x in value.items()) or "none"
    return "not known" if value is None else str(value)
