"""Tests of mtb_core.ckpt.publish: order, pruning, leftovers, and what is left when a system call fails."""

import errno
import os
import subprocess
import sys
import textwrap

import pytest

from mtb_checkpoint import verify_checkpoint
from mtb_core.api.errors import RunFailed
from mtb_core.ckpt import files, publish
from mtb_core.ckpt.catalog import is_ready, list_steps, newest, read_latest
from mtb_core.ckpt.layout import DamagedCheckpoint
from mtb_core.ckpt.manager import CheckpointManager
from mtb_core.ckpt.manifest import read_manifest

from .ckpt_ranks import FORK, Training, saved


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def ready(folder):
    return [f.step for f in list_steps(folder) if f.ready]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [(0, 0, [1, 2, 9, 10, 11, 12]), (1, 0, [12]), (3, 0, [10, 11, 12]), (2, 5, [10, 11, 12]), (1, 2, [2, 10, 12])],
)
def test_prune(tmp_path, keep_last, keep_every, kept):
    """The highest steps by number stay, and multiples of keep_every; earlier runs' checkpoints count."""
    saved(tmp_path, (1, 2, 9, 10, 11, 12), keep_last=0)
    publish.prune(tmp_path, keep_last=keep_last, keep_every=keep_every)
    assert ready(tmp_path) == kept


def test_prune_spares_latest_and_foreign(tmp_path):
    """What ``latest`` names stays though its step is low; what is no READY checkpoint is never touched or counted."""
    saved(tmp_path, (1, 2, 3, 4), keep_last=0)
    publish.write_latest(tmp_path, "step_00000001")
    (tmp_path / "step_00000004" / "READY").unlink()
    for foreign in ("step_5", "step_000000007", "notes", "step_00000009"):
        (tmp_path / foreign).mkdir()
    publish.prune(tmp_path, keep_last=1, keep_every=0)
    assert ready(tmp_path) == [1, 3]
    assert {"step_00000004", "step_5", "step_000000007", "notes", "step_00000009"} < set(names(tmp_path))


def test_prune_dry_run(tmp_path):
    """A dry run says the same and removes nothing."""
    saved(tmp_path, (1, 2), keep_last=0)
    assert publish.prune(tmp_path, keep_last=1, keep_every=0, dry_run=True) == [tmp_path / "step_00000001"]
    assert ready(tmp_path) == [1, 2]


def test_put_aside_after(tmp_path):
    """Later checkpoints get other names and stay whole; ``latest`` names the one that was gone back to."""
    saved(tmp_path, (1, 2, 9, 10), keep_last=0)
    aside = publish.put_aside_after(tmp_path, 2)
    assert ready(tmp_path) == [1, 2]
    assert newest(tmp_path) == read_latest(tmp_path) == tmp_path / "step_00000002"
    assert [path.name.rpartition("-")[0] for path in aside] == [
        "rolled_back_step_00000009",
        "rolled_back_step_00000010",
    ]
    assert all(is_ready(path) for path in aside)
    assert not any(verify_checkpoint(path).problems for path in aside)
    saved(tmp_path, (9,), keep_last=0)
    assert newest(tmp_path) == tmp_path / "step_00000009"
    assert all(path.exists() for path in aside)


def test_put_aside_all(tmp_path):
    """Where what was gone back to is elsewhere, nothing is left to resume from, and nothing names what is gone."""
    saved(tmp_path, (5, 6), keep_last=0)
    assert len(publish.put_aside_after(tmp_path, 3)) == 2
    assert newest(tmp_path) is None
    assert not (tmp_path / "latest").exists()


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_crash_while_putting_aside(tmp_path, monkeypatch, calls):
    """Wherever it happens, the folder has a checkpoint to resume from and none is lost."""
    saved(tmp_path, (1, 2, 3), keep_last=0)
    renamed, rename = [], files.rename

    def crash(source, target):
        if len(renamed) == calls:
            raise OSError(errno.EIO, "crash", str(target))
        renamed.append(target)
        rename(source, target)

    monkeypatch.setattr(files, "rename", crash)
    with pytest.raises(OSError, match="crash"):
        publish.put_aside_after(tmp_path, 1)
    monkeypatch.undo()
    assert newest(tmp_path) is not None
    assert len([p for p in tmp_path.iterdir() if is_ready(p)]) == 3
    publish.put_aside_after(tmp_path, 1)
    assert newest(tmp_path) == tmp_path / "step_00000001"


@pytest.mark.parametrize("links", [True, False])
def test_keep_checkpoint(tmp_path, monkeypatch, links):
    """A copy outlives its original, is whole, and is the only one in its folder; with links it takes no space."""
    saved(tmp_path, (1, 2, 3), keep_last=0)
    if not links:

        def refuse(source, *_, **__):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(source))

        monkeypatch.setattr(os, "link", refuse)
    best = tmp_path / "best"
    for step in (3, 1):  # a later one need not be a higher step
        kept = publish.keep_checkpoint(tmp_path / f"step_{step:08d}", best)
        assert kept == newest(best) == best / f"step_{step:08d}"
        assert names(best) == ["latest", kept.name]
        assert (kept / "manifest.json").stat().st_nlink == 1 + links
    publish.prune(tmp_path, keep_last=1, keep_every=0)
    assert ready(tmp_path) == [3]
    assert verify_checkpoint(kept).ok
    assert (kept / "manifest.json").stat().st_nlink == 1


def test_keep_checkpoint_again(tmp_path):
    """A step that is published once more replaces the one that was kept of it."""
    saved(tmp_path, (1,), keep_last=0)
    first = publish.keep_checkpoint(tmp_path / "step_00000001", tmp_path / "best")
    before = (first / "READY").read_bytes()
    saved(tmp_path, (1,), keep_last=0)
    again = publish.keep_checkpoint(tmp_path / "step_00000001", tmp_path / "best")
    assert again == first
    assert (again / "READY").read_bytes() == (tmp_path / "step_00000001" / "READY").read_bytes() != before
    assert names(tmp_path / "best") == ["latest", "step_00000001"]


@pytest.mark.parametrize("calls", range(3))
def test_a_crash_while_keeping(tmp_path, monkeypatch, calls):
    """What was kept before is there until the new one is; leftovers go with the next time."""
    saved(tmp_path, (1, 2), keep_last=0)
    publish.keep_checkpoint(tmp_path / "step_00000001", tmp_path / "best")
    count, sync = [], files.sync_folder

    def crash(path):
        count.append(path)
        if len(count) > calls:
            raise OSError(errno.EIO, "crash", str(path))
        sync(path)

    monkeypatch.setattr(files, "sync_folder", crash)
    with pytest.raises(OSError, match="crash"):
        publish.keep_checkpoint(tmp_path / "step_00000002", tmp_path / "best")
    monkeypatch.undo()
    assert is_ready(tmp_path / "best" / "step_00000001")
    kept = publish.keep_checkpoint(tmp_path / "step_00000002", tmp_path / "best")
    assert verify_checkpoint(kept).ok
    assert names(tmp_path / "best") == ["latest", "step_00000002"]


def test_only_complete_checkpoints_are_kept(tmp_path):
    """What is no complete checkpoint is refused, and nothing is left of the attempt."""
    saved(tmp_path, (1,), keep_last=0)
    (tmp_path / "step_00000001" / "READY").unlink()
    with pytest.raises(DamagedCheckpoint, match="READY"):
        publish.keep_checkpoint(tmp_path / "step_00000001", tmp_path / "best")
    assert not (tmp_path / "best").exists()


def test_leftovers_of_the_dead(tmp_path):
    """What a killed save left is removed; names that only look similar are not."""
    saved(tmp_path)
    dead = [".tmp-step_00000002-0123456789abcdef", ".tmp-latest-0123456789abcdef", ".tmp-probe-0123456789abcdef-1"]
    (tmp_path / dead[0] / "rng").mkdir(parents=True)
    for name in dead[1:]:
        (tmp_path / name).touch()
    foreign = [".tmp-step_2-0123456789abcdef", ".tmp-mine", "tmp-step_00000002-0123456789abcdef"]
    for name in foreign:
        (tmp_path / name).mkdir()
    assert [p.name for p in publish.clean_leftovers(tmp_path)] == sorted(dead)
    assert names(tmp_path) == sorted([*foreign, "latest", "step_00000001"])


def test_leftovers_of_the_living(tmp_path):
    """A save in progress, in another process, is not touched until that process has died."""
    receive, send = FORK.Pipe(duplex=False)

    def live():
        workspace = publish.Workspace.create(tmp_path, 3)
        send.send(workspace.path)
        receive_go.recv()

    receive_go, _send_go = FORK.Pipe(duplex=False)
    process = FORK.Process(target=live)
    process.start()
    path = receive.recv()
    assert publish.clean_leftovers(tmp_path) == []
    CheckpointManager(tmp_path).preflight()
    assert path.is_dir()
    process.kill()
    process.join()
    assert publish.clean_leftovers(tmp_path) == [path]


def test_clean_up_waits_for_the_pointer(tmp_path):
    """The temporary file of a pointer that is being replaced is not taken for a leftover."""
    seen = []
    publish.write_latest(tmp_path, "step_00000001", lambda _: seen.extend(publish.clean_leftovers(tmp_path)))
    assert seen == []
    assert read_latest(tmp_path) == tmp_path / "step_00000001"


def test_a_folder_that_is_no_checkpoint_is_kept(tmp_path, caplog):
    """An incomplete folder in the place of the new checkpoint makes way, but is not lost."""
    (tmp_path / "step_00000001").mkdir()
    (tmp_path / "step_00000001" / "precious").write_text("data")
    saved(tmp_path)
    assert verify_checkpoint(tmp_path / "step_00000001").ok
    [kept] = tmp_path.glob("incomplete-step_00000001-*/precious")
    assert kept.read_text() == "data"
    assert "is kept as" in caplog.text


def test_no_exchange(tmp_path, monkeypatch):
    """Where folders cannot be exchanged, saving an existing step is refused and harms nothing."""
    saved(tmp_path)
    before = read_manifest(tmp_path / "step_00000001")

    def refuse(*_):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(files, "exchange", refuse)
    training = Training()
    training.step()
    with pytest.raises(RunFailed, match=r"cannot exchange folders, so it is left as it is \(errno 17\)"):
        training.save(CheckpointManager(tmp_path, asynchronous=False))
    assert read_manifest(tmp_path / "step_00000001") == before
    assert names(tmp_path) == ["latest", "step_00000001"]


CALLS = {"write": errno.ENOSPC, "fsync": errno.EIO, "rename": errno.EIO, "mkdir": errno.ENOSPC, "open": errno.EACCES}


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize(
    "call", [pytest.param(c, marks=() if c in {"rename", "mkdir"} else pytest.mark.slow) for c in CALLS]
)
def test_every_failing_system_call(tmp_path, monkeypatch, call, exists, capsys):
    """At whichever occurrence a call fails: the save reports it and nothing of it remains, or it is complete.

    The checkpoint before it (or of the same step, where it `exists`) stays READY, and ``latest`` names a READY one.
    """
    occurrence = 0
    while not _fails_at(occurrence, tmp_path / str(occurrence), monkeypatch, call, exists=exists):
        occurrence += 1
    with capsys.disabled():
        print(f" {occurrence} cases of {call}", end="")
    assert occurrence > 0


def _fails_at(occurrence, folder, monkeypatch, call, *, exists):
    """One case; returns whether there are no more occurrences."""
    number, left, real = CALLS[call], [occurrence], getattr(os, call)

    def broken(*args, **kwargs):
        left[0] -= 1
        if left[0] == -1:
            raise OSError(number, os.strerror(number), *(str(a) for a in args[:1] if call == "open"))
        return real(*args, **kwargs)

    training, failed = saved(folder, (1, 2) if exists else (1,)), None
    if not exists:
        training.step()
    manager = CheckpointManager(folder, asynchronous=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, broken)
        try:
            training.save(manager)
        except RunFailed as error:
            failed = str(error)
    if left[0] >= 0:
        assert failed is None
        return True
    assert all(verify_checkpoint(f.path).ok for f in list_steps(folder))
    assert is_ready(read_latest(folder))
    assert ready(folder) == ([1, 2] if exists or failed is None else [1])
    if failed is None:  # only tidying up was disturbed
        assert newest(folder) == folder / "step_00000002"
    else:
        assert f"(errno {number})" in failed
        assert str(folder) in failed
        assert not exists or read_manifest(folder / "step_00000002").sequence == 2
    training.save(manager)
    assert read_latest(folder) == folder / "step_00000002"
    assert verify_checkpoint(folder / "step_00000002").ok
    publish.clean_leftovers(folder)
    kept_aside = [name for name in names(folder) if name.startswith("incomplete-")]  # it could not be read: not removed
    assert kept_aside == [] or call == "open"
    assert names(folder) == [*kept_aside, "latest", "step_00000001", "step_00000002"]
    return False


TRACED = """
import sys
from mtb_core.tests.ckpt_ranks import Training
from mtb_core.ckpt.manager import CheckpointManager
training = Training()
training.step()
manager = CheckpointManager(sys.argv[1], asynchronous=False)
manager.preflight(training.state())
training.save(manager)
"""


@pytest.mark.slow
def test_order_of_durability(tmp_path):
    """In the system calls as the kernel sees them, everything is fsynced before what refers to it."""
    if not os.access("/usr/bin/strace", os.X_OK):
        pytest.skip("strace is not installed")
    log = tmp_path / "log"
    calls = "trace=openat,fsync,rename,renameat2,mkdir,close,unlink"
    subprocess.run(
        [
            "strace",
            "-f",
            "-y",
            "-s",
            "200",
            "-e",
            calls,
            "-o",
            log,
            sys.executable,
            "-c",
            textwrap.dedent(TRACED),
            tmp_path / "c",
        ],
        check=True,
    )
    events = []
    for line in log.read_text().splitlines():
        if "fsync(" in line and str(tmp_path) in line:
            events.append("fsync " + line.partition("<")[2].partition(">")[0].removeprefix(str(tmp_path / "c")))
        elif "rename" in line and str(tmp_path) in line:
            events.append("rename " + line.rpartition(', "')[2].partition('"')[0].removeprefix(str(tmp_path / "c")))
    events = [e for e in events if "probe" not in e]
    start = next(i for i, e in enumerate(events) if "safetensors" in e)
    short = [e.replace(e.split("/")[1], "TMP") if "/.tmp-step" in e else e for e in events[start:]]
    expected = [
        "fsync /TMP/rank_00000.safetensors",
        "fsync /TMP/rng/rank_00000.json",
        "fsync /TMP/index.json",
        "fsync /TMP/state.json",
        "fsync /TMP/rng",
        "fsync /TMP",
        "fsync /TMP/README.md",
        "fsync /TMP/manifest.json",
        "fsync /TMP",
        "fsync /TMP/READY",
        "fsync /TMP",
        "rename /step_00000001",
        "fsync ",
        "fsync /.tmp-latest",
        "rename /latest",
        "fsync ",
    ]
    assert [e.partition("latest-")[0] + "latest" if ".tmp-latest" in e else e for e in short] == expected
