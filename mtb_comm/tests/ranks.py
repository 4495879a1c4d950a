"""Entries that tests run on ranks; a module, so that workers can import it."""

from __future__ import annotations

import os
import signal


def one_wrong(point, group, outputs):
    """Rank 1's result of a broadcast is off in one element."""
    if point.operation == "broadcast" and group.index == 1:
        outputs[3] += 1


def swapped(point, group, outputs):
    """Two chunks of rank 0's all_to_all are exchanged, as if they had been routed wrongly."""
    if point.operation == "all_to_all" and group.index == 0:
        half = outputs.numel() // 2
        first = outputs[:half].clone()
        outputs[:half] = outputs[half:]
        outputs[half:] = first


def dies(point, group, outputs):
    """Rank 1 is killed in the middle of a gather."""
    if point.operation == "gather" and group.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
