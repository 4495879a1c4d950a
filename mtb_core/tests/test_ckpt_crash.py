"""The crash matrix of saving: every rank and all of them killed at every named instant, synchronous and not."""

import itertools
import os

import pytest

from mtb_checkpoint import verify_checkpoint
from mtb_core.ckpt.catalog import is_ready, read_latest
from mtb_core.ckpt.manager import CheckpointManager
from mtb_core.ckpt.publish import PUBLISH_POINTS, RANK_POINTS

from .ckpt_ranks import RankFailed, Training, run_ranks, same

LAST = 4


def train(rank, folder, asynchronous, point, victims, fatal_step):
    """Train to the last step, saving each; `victims` are killed at `point` in the save of `fatal_step`."""
    training = Training(rank)
    armed = [0]

    def fault(name):
        armed[0] += name == "staged"
        if start + armed[0] == fatal_step and name == point and rank in victims:
            os.kill(os.getpid(), 9)

    manager = CheckpointManager(folder, fault_point=fault, asynchronous=asynchronous, keep_last=2, timeout_s=30)
    manager.preflight(training.state())
    found = manager.find("auto")
    if found is not None:
        training.load(manager, found)
    start = training.done
    while training.done < LAST:
        training.step()
        training.save(manager)
    manager.finish()
    return start, training.copy()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights of the uninterrupted run."""
    return run_ranks(2, train, tmp_path_factory.mktemp("whole"), False, None, (), 0)[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("point", [p for p in (*RANK_POINTS, *PUBLISH_POINTS) if p != "replaced-removed"])
def test_crash_matrix(tmp_path, whole, point, asynchronous, capsys):
    """Whoever is killed wherever: the next start resumes from a READY step and ends as the uninterrupted run."""
    # Of the publication only rank 0 knows, so it is the only one that can die at an instant of it.
    victims = [(0,), (1,), (0, 1)] if point in RANK_POINTS else [(0,)]
    cases = 0
    for number, dead in enumerate(victims):
        folder = tmp_path / str(number)
        broken = run_ranks(2, train, folder, asynchronous, point, dead, 3, expect="errors")
        assert all(isinstance(broken[v], int | RankFailed) for v in dead)
        assert is_ready(read_latest(folder))
        (start, weights), _ = run_ranks(2, train, folder, asynchronous, None, (), 0)
        assert start in {1, 2, 3}
        assert same(weights, whole)
        assert sorted(p.name for p in folder.iterdir()) == ["latest", "step_00000003", "step_00000004"]
        assert all(verify_checkpoint(folder / n).ok for n in ("step_00000003", "step_00000004"))
        cases += 1
    with capsys.disabled():
        print(f" {cases} cases at {point}", end="")


def replace(rank, folder, asynchronous, point, dead):
    """Save one step twice; `dead` are killed at `point` of the second save."""
    training, saves = Training(rank), itertools.count()
    current = [0]

    def fault(name):
        if current[0] == 1 and name == point and rank in dead:
            os.kill(os.getpid(), 9)

    manager = CheckpointManager(folder, fault_point=fault, asynchronous=asynchronous, timeout_s=30)
    manager.preflight(training.state())
    found = manager.find("auto")
    if found is not None:
        training.load(manager, found)
        return training.done, training.copy()
    training.step()
    for _ in range(2):
        manager.finish()
        current[0] = next(saves)
        training.save(manager)
    manager.finish()
    return None


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("point", [*RANK_POINTS, *PUBLISH_POINTS])
def test_crash_while_replacing(tmp_path, point, asynchronous, capsys):
    """Killed while a step is saved again: at every instant one of the two is READY under the step's name."""
    victims = [(0,), (1,), (0, 1)] if point in RANK_POINTS else [(0,)]
    for number, dead in enumerate(victims):
        folder = tmp_path / str(number)
        run_ranks(2, replace, folder, asynchronous, point, dead, expect="errors")
        assert verify_checkpoint(folder / "step_00000001").ok
        results = run_ranks(2, replace, folder, asynchronous, None, ())
        assert [step for step, _ in results] == [1, 1]
        assert sorted(p.name for p in folder.iterdir()) == ["latest", "step_00000001"]
    with capsys.disabled():
        print(f" {len(victims)} cases at {point}", end="")
