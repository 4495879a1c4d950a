"""The check of ``mtb doctor``."""

from __future__ import annotations

from mtb_core import DoctorResult, MtbError


def check() -> DoctorResult:
    """DeepSpeed can be imported for the CPU; nothing that is used here has to be compiled."""
    from .engine import import_deepspeed  # noqa: PLC0415  (seconds)

    try:
        deepspeed = import_deepspeed("cpu")
    except MtbError as error:
        return DoctorResult(ok=False, detail=str(error))
    return DoctorResult(ok=True, detail=f"{deepspeed.__version__}; no op is compiled, so no compiler is needed")
