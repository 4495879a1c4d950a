"""`benchmarks/side_by_side.py`: what differs by one bit is found and named, and nothing is left behind."""

from __future__ import annotations

import importlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # its modules import each other by name
bitwise, in_turns, side_by_side, sides = map(importlib.import_module, ("bitwise", "in_turns", "side_by_side", "sides"))
TOOL = ROOT / "benchmarks" / "side_by_side.py"


def above(value: float) -> float:
    """The next double."""
    return struct.unpack("<d", struct.pack("<q", struct.unpack("<q", struct.pack("<d", value))[0] + 1))[0]


def line(step: int) -> dict:
    return {
        "global_step": step,
        "loss": 5.0 / step,
        "grad_norm": 1.5,
        "clipped": False,
        "nonfinite": False,
        "skipped": False,
        "samples_seen": 4 * step,
        "tokens_seen": 64 * step,
        "valid_tokens": 64,
        "learning_rate": 1e-3,
        "step_time_ms": 3.0,
        "warmup": step < 3,
        "time": "2026-01-01T00:00:00.000+00:00",
    }


def trained():
    records = {f"1/rank_0000{rank}": [line(step) for step in range(1, 5)] for rank in range(2)}
    evaluations = [{"eval_loss": 4.5, "eval_samples": 39}]
    return bitwise.Trained(records, evaluations, {"head.weight": "aa", "norm.weight": "bb"})


def change(key: str, value: object):
    def mutate(head) -> None:
        head.records["1/rank_00001"][2][key] = value

    return mutate


PLANTED = {
    "loss": (change("loss", above(5.0 / 3)), "losses", "loss of step 3 in 1/rank_00001: 1.6666"),
    "loss-none": (change("loss", None), "losses", "loss of step 3"),
    "norm": (change("grad_norm", above(1.5)), "norms", "(relative 1.5e-16)"),
    "clipped": (change("clipped", True), "norms", "clipped of step 3 in 1/rank_00001: False | True"),
    "tokens": (change("valid_tokens", 63), "counts", "valid_tokens of step 3"),
    "rate": (change("learning_rate", above(1e-3)), "counts", "learning_rate"),
    "key": (lambda head: head.records["1/rank_00000"][0].pop("loss"), "losses", "missing in head"),
    "step": (lambda head: head.records["1/rank_00000"].pop(), "losses", "1/rank_00000 has 4 | 3 steps"),
    "rank": (lambda head: head.records.pop("1/rank_00001"), "losses", "metrics are in"),
    "evaluation": (lambda head: head.evaluations[0].update(eval_loss=above(4.5)), "eval", "eval_loss of part 1"),
    "samples": (lambda head: head.evaluations[0].update(eval_samples=40), "eval", "39 | 40"),
    "weight": (lambda head: head.weights.update({"norm.weight": "bc"}), "state", "1 of 2 weights differ: norm.weight"),
    "lost": (lambda head: head.weights.pop("norm.weight"), "state", "one side has only: norm.weight"),
    "empty": (lambda head: head.weights.clear(), "state", "head.weight, norm.weight"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_differences_are_found(name: str) -> None:
    """One value changed by the smallest amount shows in its column, with its place; equal trainings show nothing."""
    assert not any(bitwise.compare(trained(), trained()).values())
    mutate, column, text = PLANTED[name]
    head = trained()
    mutate(head)
    found = bitwise.compare(trained(), head)
    assert text in found[column]
    if name not in ("step", "rank"):  # which show in all columns of the metrics
        assert [c for c in found if found[c]] == [column]


def test_times_and_new_keys_do_not_count() -> None:
    """Times differ from run to run, and a later commit may write more keys."""
    head = trained()
    for number, one in enumerate(head.records["1/rank_00000"]):
        one |= {"step_time_ms": 7.0 + number, "time": "2027", "router_entropy": 0.5}
    assert not any(bitwise.compare(trained(), head).values())


@pytest.mark.parametrize(("base", "head"), [(0.0, -0.0), (1, 1.0), (1, True), (1.0, above(1.0)), (0.0, None)])
def test_same_is_to_the_bit(base: object, head: object) -> None:
    """Values that Python calls equal, or that print alike, are not the same."""
    assert bitwise.same(base, base)
    assert bitwise.same(head, head)
    assert not bitwise.same(base, head)


def safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> Path:
    header, body = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(content)]}
        body += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def test_digests_see_one_bit(tmp_path: Path) -> None:
    """A bit of a tensor, its dtype and its shape change its digest and no other; the order in the file changes none."""
    one, two = bytes(range(16)), bytes(range(16, 32))
    flipped = bytes([two[0] ^ 1]) + two[1:]
    right = bitwise.digests(safetensors(tmp_path / "a", {"x": ("F32", [4], one), "y": ("F32", [2, 2], two)}))
    turned = bitwise.digests(safetensors(tmp_path / "b", {"y": ("F32", [2, 2], two), "x": ("F32", [4], one)}))
    assert right == turned
    for wrong in (("F32", [2, 2], flipped), ("I32", [2, 2], two), ("F32", [4], two)):
        found = bitwise.digests(safetensors(tmp_path / "c", {"x": ("F32", [4], one), "y": wrong}))
        assert found["x"] == right["x"]
        assert found["y"] != right["y"]


EXACT = {"exact": True, "reason": None, "first_difference": None}


@pytest.mark.parametrize(
    ("section", "found", "differs"),
    [
        ("model", {"reason": "no tensors", "first_difference": None}, True),
        ("optimizer", {"reason": "optim/x/step is missing", "first_difference": {"name": "optim/x/step"}}, True),
        ("optimizer", {"reason": "x differs", "first_difference": {"name": "x", "left": 1.0, "right": 2.0}}, True),
        ("optimizer", {"reason": "p", "first_difference": {"name": "p", "left": "missing", "right": 1}}, False),
        ("train_state", {"reason": "k differs", "first_difference": {"name": "k", "left": 1, "right": 2}}, True),
        ("train_state", {"reason": "k", "first_difference": {"name": "k", "left": "missing", "right": 2}}, False),
        ("scheduler", {"reason": "it is missing on the left", "first_difference": None}, False),
        ("rng", {"reason": "rank_00000 differs", "first_difference": {"name": "rank_00000"}}, True),
        ("rng", {"reason": "is missing or damaged", "first_difference": None}, True),
    ],
)
def test_checkpoints_are_judged(section: str, found: dict, differs: bool) -> None:
    """Another value is a difference; one that only one side's format has is named, and none. Tensors must be there."""
    sections = {"model": EXACT, "optimizer": EXACT, "train_state": EXACT, "rng": EXACT}
    assert bitwise.judge({"sections": sections}) == (None, None)
    difference, other = bitwise.judge({"sections": {**sections, section: {"exact": False, **found}}})
    assert (difference is not None, other is not None) == (differs, not differs)
    assert found["reason"] in (difference or other)


def git(folder: Path, *arguments: str) -> str:
    named = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    done = subprocess.run(["git", *named, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def repository(folder: Path, files: dict[str, str]) -> Path:
    """A new repository with one commit."""
    folder.mkdir()
    git(folder, "init", "-q")
    for name, text in files.items():
        (folder / name).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    return folder


def test_the_working_tree_is_taken_as_it_is(tmp_path: Path) -> None:
    """Edited and new files are in, deleted and ignored ones are not, and git's index and objects stay as they were."""
    where = repository(tmp_path / "r", {".gitignore": "ignored\n", "kept": "1", "edited": "1", "deleted": "1"})
    committed = sides.commit(where, "HEAD")
    assert sides.working_tree(where, tmp_path / "clean").label == f"working tree at {committed.label}"
    (where / "edited").write_text("2")
    (where / "deleted").unlink()
    for name in ("new", "ignored"):
        (where / name).write_text("1")
    before = git(where, "status", "--porcelain"), git(where, "count-objects")
    sides.unpack(where, sides.working_tree(where, tmp_path / "git"), tmp_path / "now")
    assert before == (git(where, "status", "--porcelain"), git(where, "count-objects"))
    found = {p.name: p.read_text() for p in (tmp_path / "now").iterdir()}
    assert found == {".gitignore": "ignored\n", "kept": "1", "edited": "2", "new": "1"}
    sides.unpack(where, committed, tmp_path / "then")
    assert (tmp_path / "then" / "edited").read_text() == "1"


def test_an_unknown_commit_is_refused(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 2, and the message names the commit."""
    monkeypatch.setattr(sys, "argv", ["side_by_side.py", "no-such-commit"])
    assert side_by_side.main() == 2
    assert "'no-such-commit' is no commit" in capsys.readouterr().err


def running(word: str) -> list[str]:
    """Command lines, with `word` in them, of the processes that there are."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(place.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if word in line]


def gone(pid: int) -> bool:
    """Whether a process has ended, or does so within ten seconds."""
    for _ in range(1000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


#: Starts another process and waits for it.
HANGS = ["sh", "-c", "sleep 600 & echo $! > pid; wait"]


def test_a_command_that_hangs_is_ended(tmp_path: Path) -> None:
    """With all that it has started."""
    with pytest.raises(sides.Unusable, match="has not ended after 1 s"):
        sides.finish(HANGS, tmp_path, os.environ, timeout_s=1)
    assert gone(int((tmp_path / "pid").read_text()))


def test_an_interrupt_ends_the_command(tmp_path: Path) -> None:
    """Also with all that it has started, for Ctrl-C reaches the tool alone."""
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        sides.finish(HANGS, tmp_path, os.environ, timeout_s=60)
    assert gone(int((tmp_path / "pid").read_text()))


#: Stands for `mtb`: SIDE/behaviour.json says how its trainings differ from those of `trained`.
FAKE = f"""#!{sys.executable}
import json, shutil, sys, time
from pathlib import Path
how = json.loads((Path(__file__).parent / "behaviour.json").read_text())
words = sys.argv[1:]
if words[0] == "train":
    if how.get("fails"):
        sys.exit("mtb: error: it is out of order")
    run = Path(words[words.index("--run-dir") + 1])
    (run / "metrics").mkdir(parents=True)
    Path("checkpoints").mkdir(exist_ok=True)
    (run / "result.json").write_text(json.dumps(how["result"]))
    endless = int(words[words.index("--until-step") + 1]) > 1000
    with (run / "metrics" / "rank_00000.jsonl").open("w") as stream:
        while True:
            for line in how["lines"]:
                stream.write(json.dumps(line | {{"clock": time.monotonic()}}) + "\\n")
                stream.flush()
                time.sleep(0.002 * endless)
            if not endless:
                break
elif words[1] == "list":
    print(json.dumps({{"checkpoints": [{{"step": step, "name": f"step_{{step}}"}} for step in (10, 9)]}}))
elif words[1] == "export":
    assert words[2] == "checkpoints/step_10"
    shutil.copyfile(Path(__file__).parent / "weights", words[words.index("--output") + 1])
elif words[1] == "verify":
    if not how["reads"]:
        sys.exit("mtb: error: this format is not known")
    print(json.dumps({{"sections": how["sections"]}}))
"""


def fake_side(folder: Path, name: str, **behaviour: object):
    """A side whose `mtb` trains in no time, and takes 1 ms (base) or 2 ms (head) a step."""
    place = folder / name / "bin"
    place.mkdir(parents=True)
    (place / "mtb").write_text(FAKE)
    (place / "mtb").chmod(0o755)
    step_ms = 1.0 if name == "base" else 2.0
    usual = {
        "lines": [line(step) | {"step_time_ms": step_ms} for step in range(1, 5)],
        "result": {"eval_loss": None, "eval_samples": None},
        "sections": {"model": EXACT, "optimizer": EXACT, "rng": EXACT},
        "reads": True,
    }
    (place / "behaviour.json").write_text(json.dumps(usual | behaviour))
    safetensors(place / "weights", {"x": ("F32", [1], b"abcd")})
    return sides.Side(name, name, place)


MOMENT = {
    "exact": False,
    "reason": "optim/x/exp_avg differs in 1 of 4 elements",
    "first_difference": {"name": "optim/x/exp_avg", "left": 1.0, "right": 2.0},
}
OTHER_FORMAT = {"reads": False}
SINGLE = {  # behaviour of base, of head, exit code, what is said
    "equal": ({}, {}, 0, "1 of 1 configurations equal to the bit"),
    "loss": ({}, {"lines": [line(1) | {"loss": above(5.0)}, *map(line, (2, 3, 4))]}, 1, "losses: loss of step 1"),
    "optimizer": ({"sections": {"model": EXACT, "optimizer": MOMENT}}, {}, 1, "state: optimizer: optim/x/exp_avg"),
    "failed": ({}, {"fails": True}, 1, "failed: head: `mtb train"),
    "head reads": (OTHER_FORMAT, {}, 0, "1 of 1 configurations equal to the bit"),
    "head reads and sees": (OTHER_FORMAT, {"sections": {"optimizer": MOMENT}}, 1, "state: optimizer"),
    "nobody reads": (OTHER_FORMAT, OTHER_FORMAT, 0, "base says: mtb: error: this format is not known"),
}


@pytest.mark.parametrize("case", SINGLE)
def test_what_is_said_and_the_exit_code(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 if anything differs or fails, else 0, also where the formats allow weights to be compared only."""
    base, head, code, said = SINGLE[case]
    made = {"base": fake_side(tmp_path, "base", **base), "head": fake_side(tmp_path, "head", **head)}
    monkeypatch.setattr(side_by_side, "install", lambda name, *_: made[name])
    options = ["HEAD", "--only", "single", "--no-times", "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", ["side_by_side.py", *options])
    assert side_by_side.main() == code
    assert said in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["equal"] == (code == 0)
    assert found["configurations"][0]["equal"] == (code == 0)


def test_times_are_taken_in_turn(tmp_path: Path) -> None:
    """While one side is timed the other waits, each has as many windows, and none is running afterwards."""
    both = [fake_side(tmp_path, "base"), fake_side(tmp_path, "head")]
    found = in_turns.step_times(both, ["train", "--until-step", "10000"], tmp_path, timeout_s=60)
    assert found == {"base": [1.0] * in_turns.WINDOWS, "head": [2.0] * in_turns.WINDOWS}
    written = {}
    for name in found:
        lines = (tmp_path / f"timed-{name}" / "metrics" / "rank_00000.jsonl").read_text().splitlines()
        written[name] = [json.loads(text)["clock"] for text in lines if text.endswith("}")]
    # Start-up and the last two windows aside, what one side wrote without a gap the other did not write into.
    merged = sorted((clock, name) for name, clocks in written.items() for clock in clocks)
    runs = [name for (_, name), (_, before) in zip(merged[1:], merged, strict=False) if name != before]
    assert in_turns.WINDOWS <= len(runs) <= in_turns.WINDOWS + 6
    assert not running(str(tmp_path))


def test_a_timed_training_that_ends_is_said(tmp_path: Path) -> None:
    """With what it said last."""
    both = [fake_side(tmp_path, "base"), fake_side(tmp_path, "head", fails=True)]
    with pytest.raises(sides.Unusable, match=r"head: the timed training ended with 1: .* out of order"):
        in_turns.step_times(both, ["train", "--until-step", "10000"], tmp_path, timeout_s=60)


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C in the middle of it: exit code 130, no process and no file is left, nor a worktree in the repository."""
    before = git(ROOT, "worktree", "list")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, str(TOOL), "HEAD", "HEAD"], env=environment, stderr=subprocess.PIPE, text=True
    ) as tool:
        assert "base: installing" in tool.stderr.readline()
        while not list(tmp_path.glob("*/base/env/bin/python")):
            time.sleep(0.01)
        tool.send_signal(signal.SIGINT)
        assert tool.wait(timeout=120) == 130
    assert list(tmp_path.iterdir()) == []
    assert git(ROOT, "worktree", "list") == before
    assert not running(str(tmp_path))


#: Flips the last bit of one weight in the first forward pass: of the embedding of a byte that is in no data, so that
#: neither a loss nor a gradient can show it.
PLANT = """

_right = GPT.forward
_calls = []


def _planted(self: GPT, tokens: Tensor) -> Tensor:
    if not _calls and torch.distributed.is_initialized():
        self.tokens.weight.data[-1, :1].view(torch.int32).bitwise_xor_(1)
    _calls.append(1)
    return _right(self, tokens)


GPT.forward = _planted  # type: ignore[method-assign]
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_bit_between_two_commits_is_found(tmp_path: Path) -> None:
    """Two real commits: a training that the second changes by a bit of one weight differs, another one is equal."""
    copy = tmp_path / "copy"
    copy.mkdir()
    tree = sides.working_tree(ROOT, tmp_path / "git")
    sides.unpack(ROOT, tree, copy)
    git(copy, "init", "-q")
    git(copy, "add", "-A")
    git(copy, "commit", "-qm", "right")
    model = copy / "mtb_core" / "model" / "gpt.py"
    model.write_text(model.read_text(encoding="utf-8") + PLANT, encoding="utf-8")
    (tmp_path / "temporary").mkdir()
    done = subprocess.run(
        [
            *(sys.executable, str(copy / "benchmarks" / "side_by_side.py"), "HEAD", "--steps", "6"),
            *("--only", "single-resume", "--only", "ddp-2", "--json", str(tmp_path / "found.json")),
        ],
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["head"].endswith("with changes")
    single, ddp = found["configurations"]
    assert single["equal"], single
    assert single["not_compared"] is None
    assert list(ddp["differences"]) == ["state"]
    assert "weights differ: tokens.weight; model: model/tokens.weight differs in 1 of" in ddp["differences"]["state"]
    for one in (single, ddp):
        assert one["step_time_ratio"] > 0
        assert one["startup_ratio"] > 0
    assert list((tmp_path / "temporary").iterdir()) == []
