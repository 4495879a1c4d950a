"""Logs of nccl-tests, old and new."""

from __future__ import annotations

import pytest

from mtb_comm.compare import pair_log
from mtb_comm.nccl_log import parse_log, read_log
from mtb_core import ConfigError

NEW = """\
# nccl-tests version 2.18.3 nccl-headers=23003 nccl-library=23003
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 1024 maxBytes 1048576 step: 1024(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid  10563 on some-host device  0 [0000:06:00] Some Device
#  Rank  1 Group  0 Pid  10563 on some-host device  1 [0000:07:00] Some Device
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
        1024           256     float     sum      -1    10.00    0.10    0.10       0    12.00    0.09    0.09       0
     1048576        262144     float     sum      -1    50.00   20.97   20.97       0    52.00   20.16   20.16     N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 10.3
# Collective test concluded: all_reduce_perf
"""

OLD = """\
# nThread 1 nGpus 4 minBytes 8 maxBytes 8 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#
#                                             out-of-place                       in-place
#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)             (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           8             2    half    20.11    0.00    0.00  2e-07    19.95    0.00    0.00    N/A
"""


def test_new_table():
    """Both halves of each line, with the program's operation and the number of ranks."""
    rows = list(parse_log(NEW.splitlines()))
    assert [(r.operation, r.world_size, r.dtype, r.reduction) for r in rows] == [("all_reduce", 2, "fp32", "sum")] * 4
    assert [(r.size_bytes, r.in_place, r.time_ms, r.wrong) for r in rows] == [
        (1024, False, 0.010, 0),
        (1024, True, 0.012, 0),
        (1048576, False, 0.050, 0),
        (1048576, True, 0.052, None),
    ]
    assert rows[3].busbw_gb_per_sec == 20.16


def test_old_table_without_program_and_root():
    """A table without redop and root columns is read by its header; what is not said stays unknown."""
    rows = list(parse_log(OLD.splitlines()))
    assert [(r.operation, r.world_size, r.dtype, r.reduction, r.in_place) for r in rows] == [
        (None, None, "fp16", None, False),
        (None, None, "fp16", None, True),
    ]


def test_mpirun_tags_and_several_programs():
    """What mpirun puts before lines is not in the way, and a second program's rows are its own."""
    second = NEW.replace("all_reduce_perf", "alltoall_perf_mpi").replace("     sum", "    none")
    tagged = "\n".join(f"[1,0]<stdout>:{line}" for line in (NEW + second).splitlines())
    rows = list(parse_log(tagged.splitlines()))
    assert [r.operation for r in rows] == ["all_reduce"] * 4 + ["all_to_all"] * 4
    assert {r.world_size for r in rows} == {2}
    assert rows[-1].reduction is None


def test_no_log(tmp_path):
    """Files that are missing or hold no table are refused by name."""
    with pytest.raises(ConfigError, match="cannot be read"):
        read_log(tmp_path / "missing.log")
    other = tmp_path / "other.log"
    other.write_text("hello\n1 2 three\n")
    with pytest.raises(ConfigError, match="holds no table"):
        read_log(other)


def ours(operation, size, ms):
    return {
        "operation": operation, "dtype": "fp32", "reduction": "sum" if operation == "all_reduce" else None,
        "in_place": operation == "all_reduce", "split": None, "world_size": 4, "size_bytes": size,
        "time_ms": {"mean": ms}, "busbw_gb_per_sec": 1.0,
    }  # fmt: skip


def test_paired_with_our_rows():
    """The half with our placement is set beside each size; sizes of one side only are kept."""
    document = {"results": [ours("all_reduce", 1024, 0.024), ours("all_reduce", 4096, 1.0)]}
    pairs = pair_log(document, list(parse_log(NEW.splitlines())))
    assert [(p.shown["size_bytes"], p.ratio) for p in pairs] == [(1024, 2.0), (4096, None), (1048576, None)]
    assert pairs[0].theirs["world_size"] == 2
