"""Entry point: the evidence of a training. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from mtb_core import EvidenceInfo, hookimpl

PLUGIN_API = 2


@hookimpl
def mtb_evidence() -> Sequence[EvidenceInfo]:
    """Evidence ``recorded``."""
    return [
        EvidenceInfo(
            "recorded", "Machine, code, and whether the times may be compared", "mtb_evidence.recording:RunEvidence"
        )
    ]
