"""Tests of mtb_core.ckpt.manager: real ranks that save, fail, and go on."""

import errno
import logging
import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from mtb_checkpoint import verify_checkpoint
from mtb_core.api.errors import ConfigError, RunFailed
from mtb_core.api.values import State
from mtb_core.ckpt import files, publish, saving
from mtb_core.ckpt.catalog import is_ready, list_steps, read_latest
from mtb_core.ckpt.manager import CheckpointManager
from mtb_core.ckpt.manifest import read_manifest
from mtb_core.ckpt.opened import open_checkpoint

from .ckpt_ranks import RankFailed, Training, run_ranks, same, saved


def draw_more(rank):
    """Let ranks' streams run apart, in every generator."""
    if rank:
        torch.rand(1)
        np.random.rand()
        random.random()


def interrupted(rank, folder, save_at, last, asynchronous):
    """Losses of a run that saves at `save_at`, is rebuilt there from the checkpoint, and goes on; and its weights."""
    training, losses = Training(rank), []
    with CheckpointManager(folder, asynchronous=asynchronous) as manager:
        manager.preflight(training.state())
        for step in range(1, last + 1):
            losses.append((training.step(), torch.rand(1).item(), np.random.rand(), random.random()))
            draw_more(rank)
            if step in save_at:
                training.save(manager)
                manager.finish()
                training = Training(rank, seed=99)
                training.load(manager, manager.find("latest"))
    return losses, training.copy()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_resume_is_bitwise(tmp_path, world, asynchronous):
    """FR-11: with dropout and every generator in use, a resumed run equals the uninterrupted one on each rank."""
    whole = run_ranks(world, interrupted, tmp_path / "whole", [], 6, asynchronous)
    parts = run_ranks(world, interrupted, tmp_path / "parts", [2, 3, 5], 6, asynchronous)
    for (losses, weights), (resumed_losses, resumed_weights) in zip(whole, parts, strict=True):
        assert losses == resumed_losses
        assert same(weights, resumed_weights)


def test_ranks_save_their_own_streams(tmp_path):
    """FR-11: the saved random states of two ranks differ."""
    run_ranks(2, interrupted, tmp_path, [1], 1, False)
    one, other = ((tmp_path / "step_00000001" / "rng" / f"rank_0000{r}.json").read_text() for r in range(2))
    assert one != other


def reshaped(rank, folder, world_before):
    training = Training(rank)
    manager = CheckpointManager(folder)
    loaded = training.load(manager, manager.find("latest"))
    streams = (torch.rand(1).item(), np.random.rand(), random.random())
    training.save(manager)
    manager.finish()
    return loaded.deterministic, loaded.determinism_reason, streams, training.copy()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_another_world_size(tmp_path, before, after):
    """FR-11, FR-17: weights are exact, no two streams are alike, and all later checkpoints say why they are not exact."""
    _, weights = run_ranks(before, interrupted, tmp_path, [2], 2, False)[0]
    results = run_ranks(after, reshaped, tmp_path, before)
    again = run_ranks(after, reshaped, tmp_path, before)
    assert all(same(weights, copy) for *_, copy in results)
    assert [r[0] for r in results] == [False] * after
    assert f"resumed on {after} ranks what {before} had saved" in results[0][1]
    streams = [s for r in results for s in r[2]]
    assert len(set(streams)) == len(streams)
    assert [r[:2] for r in again] == [r[:2] for r in results]
    assert read_manifest(tmp_path / "step_00000002").values["deterministic"] is False


def snapshot_isolation(rank, folder):
    """Save while the writer is held up, change everything, then let it go; returns what was to be saved."""
    go = threading.Event()
    training = Training(rank)
    manager = CheckpointManager(folder, fault_point=lambda name: name == "staged" or go.wait(60))
    training.step()
    expected = training.copy()
    sections = training.sections()
    manager.save(1, training.state(), sections=sections)
    sections["train_state"]["global_step"] = 77
    training.step()
    training.step()
    go.set()
    manager.finish()
    return expected


@pytest.mark.parametrize("world", [1, 2])
def test_snapshot_shares_nothing(tmp_path, world):
    """FR-23: what is saved belongs to the step of the save, though training goes on before a byte is written."""
    expected = run_ranks(world, snapshot_isolation, tmp_path)[0]
    training = Training(seed=5)
    manager = CheckpointManager(tmp_path)
    training_state = training.state()
    if world == 1:
        loaded = manager.load(tmp_path / "step_00000001", training_state)
    else:
        loaded = manager.load(tmp_path / "step_00000001", training_state, allow_missing_rng=True)
    assert same(expected, training.copy())
    assert loaded.sections["train_state"]["global_step"] == 1


def back_to_back(rank, folder):
    training = Training(rank)
    seen = []
    with CheckpointManager(folder, keep_last=2, published=lambda _path, step: seen.append(step)) as manager:
        manager.preflight(training.state())
        for _ in range(20):
            training.step()
            training.save(manager)
            manager.settle(_all_reduced(manager.poll_vote()))
    return seen


def _all_reduced(vote):
    if not torch.distributed.is_initialized():
        return vote
    total = torch.tensor(vote)
    torch.distributed.all_reduce(total)
    return total.item()


def test_twenty_saves(tmp_path):
    """FR-23: a save after every step neither deadlocks with training's collectives nor loses one."""
    assert run_ranks(2, back_to_back, tmp_path) == [list(range(1, 21))] * 2
    assert [f.step for f in list_steps(tmp_path) if f.ready] == [19, 20]
    assert read_latest(tmp_path) == tmp_path / "step_00000020"
    assert all(verify_checkpoint(f.path).ok for f in list_steps(tmp_path))


def watched(rank, folder):
    """Saves with keep_last 1 and a slow writer; rank 0 samples the folder all the while."""
    bad, stop = [], threading.Event()

    def watch():
        while not stop.is_set():
            pointed = read_latest(folder)
            if not is_ready(pointed) and read_latest(folder) == pointed:
                bad.append(pointed)

    training = Training(rank)
    with CheckpointManager(folder, keep_last=1, fault_point=lambda _: time.sleep(0.01)) as manager:
        training.step()
        training.save(manager)
        manager.finish()
        watcher = threading.Thread(target=watch)
        watcher.start()
        for _ in range(4):
            training.step()
            training.save(manager)
        manager.finish()
        stop.set()
        watcher.join()
    return bad


def test_latest_is_ready_at_every_instant(tmp_path):
    """FR-21: whenever one looks, ``latest`` names a READY checkpoint, also with only one kept."""
    assert run_ranks(2, watched, tmp_path) == [[], []]


def failing(rank, folder, asynchronous, bad_rank, where):
    """A good save, then one that fails on `bad_rank`; how it ended, and whether training could go on to vote."""
    training = Training(rank)
    manager = CheckpointManager(folder, asynchronous=asynchronous)
    training.step()
    training.save(manager)
    manager.finish()
    if rank == bad_rank:
        _break(where)
    training.step()
    try:
        training.save(manager)
        while not (votes := _all_reduced(manager.poll_vote())):
            time.sleep(0.01)
        assert asynchronous
        manager.settle(votes)
    except RunFailed as error:
        return str(error), error.rank
    return None


def _break(where):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/somewhere")

    def broken(*_, **__):
        raise ZeroDivisionError("in the writer")

    if where == "stage":
        saving.Image.stage = broken
    else:
        setattr(files, where, full)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("where", ["write_durably", "make_folder", "sync_folder", "stage"])
def test_failure_on_one_rank(tmp_path, where, asynchronous):
    """FR-24: all ranks leave with the same message: rank, path, errno; nothing of the failed save remains."""
    results = run_ranks(2, failing, tmp_path, asynchronous, 1, where)
    assert results[0] == results[1]
    message, rank = results[0]
    assert rank == 1
    expected = (
        "ZeroDivisionError: in the writer" if where == "stage" else "/somewhere: No space left on device (errno 28)"
    )
    assert message == (
        f"The checkpoint of step 2 was not saved: rank 1: {expected}. "
        f"The earlier checkpoints in {tmp_path} are as they were."
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000001"]
    assert verify_checkpoint(tmp_path / "step_00000001").ok


def small_disk(rank, folder):
    import resource
    import signal

    manager = CheckpointManager(folder)
    manager.preflight()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    state = State({})
    training = Training(rank, widths=(5, 400_000, 1))
    state = training.state()
    try:
        manager.save(1, state)
        manager.finish()
    except RunFailed as error:
        return str(error)
    return None


def test_file_too_large(tmp_path):
    """FR-24: a limit of the operating system in the middle of a file ends the save on all ranks."""
    one, other = run_ranks(2, small_disk, tmp_path)
    assert one == other
    assert f"(errno {errno.EFBIG})" in one
    assert "rank_00000.safetensors" in one
    assert list(tmp_path.iterdir()) == []


def preflighted(rank, folder):
    folder = folder[rank] if isinstance(folder, list) else folder
    try:
        CheckpointManager(folder).preflight()
    except RunFailed as error:
        return str(error)
    return None


def test_preflight_not_a_folder(tmp_path):
    """FR-24: a component of the path that is a file is found before training, on all ranks, with path and errno."""
    (tmp_path / "file").touch()
    one, other = run_ranks(2, preflighted, tmp_path / "file" / "x")
    assert one == other
    assert f"Checkpoints cannot be written to {tmp_path}/file/x: rank 0" in one
    assert f"(errno {errno.ENOTDIR})" in one


def test_preflight_different_folders(tmp_path):
    """FR-25: ranks that were given different folders are told so."""
    one, other = run_ranks(2, preflighted, [tmp_path / "a", tmp_path / "b"])
    assert one == other
    assert "different checkpoint folders" in one


def test_preflight_leaves_nothing(tmp_path):
    """The check of writability leaves no file behind."""
    assert run_ranks(2, preflighted, tmp_path / "new" / "folder") == [None, None]
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def odd(rank, folder):
    losses, _ = interrupted(rank, folder, [1], 2, True)
    return losses


def test_odd_paths(tmp_path):
    """FR-24: blanks, signs, other alphabets and long names in the path work end to end."""
    folder = tmp_path / "a b=c" / "größe-Ж" / ("n" * 200)
    run_ranks(2, odd, folder)
    assert verify_checkpoint(folder / "step_00000001").ok


def test_moved_folder(tmp_path):
    """FR-21: the pointer is relative: a folder that was moved resumes."""
    saved(tmp_path / "old", (1, 2))
    (tmp_path / "old").rename(tmp_path / "new")
    assert (tmp_path / "new" / "latest").read_text() == "step_00000002\n"
    assert not (tmp_path / "new" / "latest").is_symlink()
    manager = CheckpointManager(tmp_path / "new")
    assert Training().load(manager, manager.find("latest")).step == 2


def other_values(rank, folder):
    manager = CheckpointManager(folder)
    manager.preflight()
    try:
        manager.save(1, Training().state(), meta={"loss": rank, "strategy": "single"})
    except RunFailed as error:
        return str(error)
    return None


def test_values_of_one_rank(tmp_path):
    """FR-25: values that differ between ranks are refused and named; nothing is written."""
    one, other = run_ranks(2, other_values, tmp_path)
    assert one == other
    assert "rank 1 has other values than rank 0 for loss" in one
    assert list(tmp_path.iterdir()) == []


def not_json(rank, folder):
    manager = CheckpointManager(folder)
    manager.preflight()
    try:
        manager.save(1, Training().state(), meta={"loss": float("nan") if rank else 1.0})
    except RunFailed as error:
        return str(error)
    return None


def test_values_that_are_no_json(tmp_path):
    """A value that strict JSON has no place for ends the save on all ranks."""
    one, other = run_ranks(2, not_json, tmp_path)
    assert one == other
    assert "rank 1: ValueError" in one
    assert list(tmp_path.iterdir()) == []


def test_error_surfaces_at_the_next_save(tmp_path, monkeypatch):
    """A loop that never votes learns of a failed save when it saves again, and at the end."""
    training = Training()
    manager = CheckpointManager(tmp_path)
    manager.preflight()
    training.step()
    monkeypatch.setattr(files, "exchange", None)
    monkeypatch.setattr(publish, "write_latest", lambda *_: 1 / 0)
    training.save(manager)
    with pytest.raises(RunFailed, match="step 1 was not saved: rank 0: ZeroDivisionError"):
        training.save(manager)
    manager.finish()
    assert list(tmp_path.iterdir()) == []


def test_saving_a_step_again(tmp_path):
    """The published checkpoint of a step is replaced as a whole by a new one of the same step."""
    training = saved(tmp_path)
    with torch.no_grad():
        training.model[0].weight.fill_(3)
    with CheckpointManager(tmp_path, training and None) as manager:
        training.save(manager)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000001"]
    again = Training()
    again.load(CheckpointManager(tmp_path), tmp_path / "step_00000001")
    assert same(again.copy(), training.copy())
    assert read_manifest(tmp_path / "step_00000001").sequence == 2


def test_changed_shapes(tmp_path):
    """A state whose tensors change between saves is planned anew."""
    manager = CheckpointManager(tmp_path, asynchronous=False)
    manager.preflight(Training().state())
    manager.save(1, Training().state())
    training = Training(widths=(5, 9, 1))
    manager.save(2, training.state())
    again = Training(widths=(5, 9, 1), seed=3)
    manager.load(tmp_path / "step_00000002", again.state())
    assert same(again.copy(), training.copy())


def test_attachments(tmp_path):
    """Further files of a rank are copied as they were at the save, and belong to the checkpoint."""
    (tmp_path / "m.jsonl").write_text("1\n2\n")
    go = threading.Event()
    manager = CheckpointManager(tmp_path / "c", fault_point=lambda name: name == "staged" or go.wait(60))
    manager.preflight()
    Training().save(manager, attachments={"metrics/rank_00000.jsonl": tmp_path / "m.jsonl"})
    with (tmp_path / "m.jsonl").open("a") as file:
        file.write("3\n")
    go.set()
    manager.finish()
    step = tmp_path / "c" / "step_00000000"
    assert (step / "metrics" / "rank_00000.jsonl").read_text() == "1\n2\n"
    assert verify_checkpoint(step).ok


def test_layout(tmp_path):
    """A checkpoint has the files of the contract, and the manifest lists all of them."""
    saved(tmp_path)
    step = tmp_path / "step_00000001"
    names = {str(p.relative_to(step)) for p in step.rglob("*") if p.is_file()}
    listed = {"rank_00000.safetensors", "index.json", "rng/rank_00000.json", "state.json", "README.md"}
    assert names == {*listed, "manifest.json", "READY"}
    manifest = read_manifest(step)
    assert manifest.files.keys() == listed
    assert manifest.values["created_at"].endswith("+00:00")
    assert open_checkpoint(step).entries.keys() == Training().state().pieces.keys()


def test_find(tmp_path, caplog):
    """``auto`` finds nothing in an empty folder; ``latest`` refuses; both take what is there."""
    manager = CheckpointManager(tmp_path)
    assert manager.find("auto") is None
    with pytest.raises(ConfigError, match="found no complete checkpoint"):
        manager.find("latest")
    saved(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert manager.find("auto") == manager.find("latest") == tmp_path / "step_00000001"
    assert not caplog.records


def killed(rank, folder, point, victims):
    """Save at every step; the ranks in `victims` die at `point` of the second save."""
    training = Training(rank)

    def fault(name):
        if training.done == 2 and name == point and rank in victims:
            os.kill(os.getpid(), 9)

    manager = CheckpointManager(folder, fault_point=fault, asynchronous=False, timeout_s=20)
    manager.preflight(training.state())
    found = manager.find("auto")
    if found is not None:
        training.load(manager, found)
    start = training.done
    while training.done < 3:
        training.step()
        training.save(manager)
    return start, training.copy()


@pytest.mark.parametrize(
    ("point", "victims", "resumed"),
    [
        ("tensors-written", (1,), 1),
        ("rank-synced", (0, 1), 1),
        ("agreed", (0,), 1),
        ("ready-synced", (0,), 1),
        ("renamed", (0,), 2),
        ("latest-written", (0, 1), 2),
        ("latest-replaced", (0,), 2),
    ],
)
def test_killed_in_a_save(tmp_path, point, victims, resumed):
    """FR-18: killed at an instant of a save, the next start resumes from a READY step and ends as if nothing was."""
    whole = run_ranks(2, killed, tmp_path / "whole", None, ())
    broken = run_ranks(2, killed, tmp_path / "run", point, victims, expect="errors")
    assert all(isinstance(broken[v], int | RankFailed) for v in victims)
    (start, weights), _ = run_ranks(2, killed, tmp_path / "run", None, ())
    assert start == resumed
    assert same(weights, whole[0][1])
    names = sorted(p.name for p in (tmp_path / "run").iterdir())
    assert names == ["latest", "step_00000001", "step_00000002", "step_00000003"]
    assert all(verify_checkpoint(tmp_path / "run" / n).ok for n in names[1:])


def test_context_is_found(tmp_path):
    """Without a context of ours, one rank or the initialised process group is taken."""
    assert CheckpointManager(tmp_path).ctx.world_size == 1
    assert run_ranks(2, lambda rank: (CheckpointManager(Path("/tmp")).ctx.world_size, rank)) == [(2, 0), (2, 1)]


def test_counts_and_values_that_a_caller_left_out(tmp_path):
    """Every checkpoint has what readers rely on, given or not; what contradicts the step is not saved."""
    manager = CheckpointManager(tmp_path, asynchronous=False)
    manager.preflight()
    manager.save(3, Training().state(), meta={"samples_seen": 12}, sections={"train_state": {"mine": 1}})
    loaded = manager.load(tmp_path / "step_00000003", Training().state())
    assert loaded.sections["train_state"] == {"global_step": 3, "samples_seen": 12, "tokens_seen": 0, "mine": 1}
    assert (loaded.values["config"], loaded.values["strategy"]) == ({}, "unknown")
    with pytest.raises(RunFailed, match="'train_state' is of step 9"):
        manager.save(4, Training().state(), sections={"train_state": {"global_step": 9}})
    with pytest.raises(RunFailed, match="'strategy' is missing or of the wrong type"):
        manager.save(4, Training().state(), meta={"strategy": 7})
    assert manager.ready_steps() == [3]
