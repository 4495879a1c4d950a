"""Entry point: ``mtb doctor`` and the checks of machine and installation. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from mtb_core import CommandInfo, DoctorCheck, hookimpl

PLUGIN_API = 2


@hookimpl
def mtb_commands() -> Sequence[CommandInfo]:
    """``doctor``."""
    about = "Check this machine and installation."
    return [CommandInfo("doctor", about, "mtb_doctor.command:doctor", "Set-up and inspection")]


@hookimpl
def mtb_doctor_checks() -> Sequence[DoctorCheck]:
    """Checks of this machine and installation."""
    checks = {
        "python": "The Python version is supported.",
        "torch": "Torch imports and has distributed support.",
        "gloo": "Two processes can talk to each other.",
        "disk": "The run folder can be written to and has room.",
        "shm": "Shared memory has room.",
        "cuda": "CUDA devices and NCCL, where there are any.",
        "plugins": "Every installed plugin could be loaded.",
    }
    return [DoctorCheck(name, text, f"mtb_doctor.checks:check_{name}") for name, text in checks.items()]
