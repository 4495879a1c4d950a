"""``README.md`` of a checkpoint: what it is, for people who find the folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXT = """# Checkpoint of step {step}

Written by MiniTrainBench on {created_at} (UTC) with strategy `{strategy}` on {world_size} rank(s), precision
{precision}, after {samples_seen} samples and {tokens_seen} tokens.

- `manifest.json` lists every file with its size and digest; `READY` names the digest of the manifest and was written
  last. Without a fitting `READY` this folder is not a checkpoint. `mtb checkpoint verify FOLDER` checks everything.
- {storage_readme}
- `state.json` holds schedule, train state, data position and the plugins' state; `rng/` the random state of each rank;
  `metrics/`, where present, the metric lines so far.

What may resume from it: `mtb train --resume FOLDER` with the same training settings (fingerprint
`{config_fingerprint}`), under any strategy that has the same parameters. On {world_size} rank(s) the run goes on bit
for bit. On another number of ranks model, optimizer, schedule and data position are exact, but the random streams
(dropout) are seeded anew. What may not: another model, other data or another optimizer; nor an older MiniTrainBench
than format version {format_version}.

Deterministic continuation of the original run: {deterministic}.
"""


def readme_text(values: Mapping[str, Any], storage_readme: str) -> str:
    """The text, from the manifest's values; what a caller did not give is "unknown".

    Args:
        storage_readme: Markdown on the files of tensors, see `mtb_core.ckpt.storage`.
    """
    shown = {
        "created_at": "unknown date",
        "strategy": "unknown",
        "precision": "unknown",
        "samples_seen": "an unknown number of",
        "tokens_seen": "an unknown number of",
        "config_fingerprint": "unknown",
        **values,
        "storage_readme": storage_readme,
    }
    shown["deterministic"] = "yes" if values["deterministic"] else f"no ({values['determinism_reason']})"
    return _TEXT.format_map(shown)
