"""Logs of nccl-tests, old and new."""

from __future__ import annotations

import pytest

from mtb_comm.compare import comparison, other_conditions, pair_documents, pair_log
from mtb_comm.nccl_log import parse_log, read_log
from mtb_comm.tables import print_pairs
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
    """Tags of mpirun before lines are ignored, and a second program's rows are its own."""
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
        "time_ms": {"mean": ms}, "busbw_gb_per_sec": 1.0, "splits_bytes": None, "wrong": 0,
    }  # fmt: skip


def test_paired_with_our_rows():
    """The half with our placement is set beside each size; sizes of one side only are kept."""
    document = {"results": [ours("all_reduce", 1024, 0.024), ours("all_reduce", 4096, 1.0)]}
    pairs = pair_log(document, list(parse_log(NEW.splitlines())))
    assert [(p.shown["size_bytes"], p.ratio) for p in pairs] == [(1024, 2.0), (4096, None), (1048576, None)]
    assert pairs[0].theirs["world_size"] == 2


ROOTS = """# Collective test starting: broadcast_perf
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
        1024           256     float    none       1    99.00    0.01    0.01      0    98.00    0.01    0.01      0
        1024           256     float    none       0    11.00    0.09    0.09      0    12.00    0.09    0.09      7
        1024           256     float    none       0    13.00    0.09    0.09      0    24.00    0.09    0.09      0
        1024           256     float    none       2    97.00    0.01    0.01      0    96.00    0.01    0.01      0
"""


def test_every_line_of_a_size_is_shown():
    """Lines of our root are each a pair, in their order; those of other roots stand alone; wrong elements are kept."""
    mine = {**ours("broadcast", 1024, 0.012), "in_place": True}
    pairs = pair_log({"results": [mine]}, list(parse_log(ROOTS.splitlines())))
    assert [(p.ours is not None, p.shown["root"], p.ratio) for p in pairs] == [
        (True, 0, 1.0),
        (True, 0, 0.5),
        (False, 1, None),
        (False, 2, None),
    ]
    assert [p.theirs["wrong"] for p in pairs] == [7, 0, 0, 0]


def test_wrong_elements_of_a_log_are_shown(capsys):
    """The table says that the log's elements were wrong, and which root a line is of."""
    mine = {**ours("broadcast", 1024, 0.012), "in_place": True}
    print_pairs(pair_log({"results": [mine]}, list(parse_log(ROOTS.splitlines()))), "nccl-tests")
    out = capsys.readouterr().out
    assert "wrong, nccl-tests" in out
    assert "root 2" in out
    assert out.count(" 7") == 1


def test_other_splits_are_other_points():
    """Two uneven all_to_alls are the same point only where every part is."""
    one = {**ours("all_to_all", 1024, 1.0), "split": "uneven", "splits_bytes": [[1024, 0], [1024, 0]]}
    same, other = {**one}, {**one, "splits_bytes": [[0, 1024], [0, 1024]]}
    assert [p.ratio for p in pair_documents({"results": [one]}, {"results": [same]})] == [1.0]
    assert [p.ratio for p in pair_documents({"results": [one]}, {"results": [other]})] == [None, None]


def test_other_conditions_are_named(capsys):
    """Of another backend or number of groups, or with times that are not valid: the table and the JSON say so."""
    mine = {
        "results": [ours("all_reduce", 1024, 1.0)], "groups": 1, "backend": "gloo", "device": "cpu",
        "performance_valid": True, "performance_invalid_reasons": [],
    }  # fmt: skip
    theirs = {
        **mine, "groups": 2, "backend": "nccl", "performance_valid": False, "performance_invalid_reasons": ["busy", "hot"],
    }  # fmt: skip
    assert other_conditions(mine, mine) == []
    conditions = other_conditions(mine, theirs)
    assert conditions == [
        "groups 1 here, 2 there", "backend gloo here, nccl there", "times there are not valid: busy; hot",
    ]  # fmt: skip
    pairs = pair_documents(mine, theirs)
    print_pairs(pairs, "x.json", conditions)
    assert capsys.readouterr().out.count("not the same conditions") == 3
    found = comparison(pairs, "x.json", conditions)
    assert (found["with"], found["other_conditions"]) == ("x.json", conditions)
    assert found["points"][0]["ratio"] == 1.0
    assert found["points"][0]["theirs"]["mean_ms"] == 1.0
