"""Evidence: where a figure was measured, of what code, and whether it may be compared. See ``docs/evidence.md``.

The result of every training has it where this package is installed. For commands that measure something else there are
`environment`, `provenance`, `Sample`, `gather_uses` and `performance_fields`; `audit_folder` and `private_details`
find what must not be handed on. Importing it imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtb_core import lazy_names

if TYPE_CHECKING:
    from .audit import audit_folder, private_details
    from .origin import environment, provenance
    from .validity import Sample, Timed, formal_obstacles, gather_uses, performance_fields

__all__ = [
    "Sample",
    "Timed",
    "audit_folder",
    "environment",
    "formal_obstacles",
    "gather_uses",
    "performance_fields",
    "private_details",
    "provenance",
]

_LAZY = {
    "Sample": ".validity",
    "Timed": ".validity",
    "audit_folder": ".audit",
    "environment": ".origin",
    "formal_obstacles": ".validity",
    "gather_uses": ".validity",
    "performance_fields": ".validity",
    "private_details": ".audit",
    "provenance": ".origin",
}

__getattr__ = lazy_names(__name__, _LAZY)
