"""`mtb doctor`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner

from mtb_core import CheckFailed, DoctorCheck, DoctorResult
from mtb_core.cli import main
from mtb_core.registry.discovery import discover
from mtb_doctor import checks as own
from mtb_doctor import command as module

SMALL = (
    "--device cpu --quiet --steps 1 --warmup-steps 0 --seq-length 4 --d-model 8 --n-heads 2 --n-layers 1 --batch-size 2"
)


def check(name: str) -> DoctorCheck:
    return DoctorCheck(name, "Help.", f"{__name__}:check_{name}")


def use(monkeypatch: pytest.MonkeyPatch, **checks: Callable[[], object]) -> None:
    """Let the registry hold these checks only."""
    registry = attrs.evolve(discover(strict=False), doctor_checks={name: check(name) for name in checks})
    monkeypatch.setattr(module, "discover", lambda **_: registry)
    monkeypatch.setattr(module, "load_reference", lambda reference: checks[reference.partition(":check_")[2]])


def good() -> DoctorResult:
    return DoctorResult(ok=True, detail="fine")


def bad() -> DoctorResult:
    return DoctorResult(ok=False, detail="broken; mend it")


def absent() -> DoctorResult:
    return DoctorResult(ok=None, detail="no such thing here")


def test_all_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line a check with what was seen; what does not apply is no failure; exit code 0."""
    use(monkeypatch, good=good, absent=absent)
    result = CliRunner().invoke(module.doctor)
    assert result.exit_code == 0
    assert result.stdout == "good    ok    fine\nabsent  n/a   no such thing here\n"


def test_a_failed_check_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others still run and show; the error names the failed one and carries exit code 1."""
    use(monkeypatch, bad=bad, good=good)
    result = CliRunner().invoke(module.doctor)
    assert isinstance(result.exception, CheckFailed)
    assert result.exception.exit_code == 1
    assert "1 of 2 checks failed: bad" in str(result.exception)
    assert result.stdout == "bad   FAIL  broken; mend it\ngood  ok    fine\n"


def test_json_is_one_strict_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """--json prints one document and nothing else, also when a check fails."""
    use(monkeypatch, bad=bad, absent=absent)
    result = CliRunner().invoke(module.doctor, ["--json"])
    assert json.loads(result.stdout) == {
        "schema_version": 1,
        "ok": False,
        "checks": [
            {"name": "bad", "help": "Help.", "ok": False, "detail": "broken; mend it"},
            {"name": "absent", "help": "Help.", "ok": None, "detail": "no such thing here"},
        ],
    }


def raises() -> DoctorResult:
    msg = "two\nlines"
    raise OSError(msg)


def exits() -> DoctorResult:
    raise SystemExit(9)


def returns_nonsense() -> str:
    return "yes"


@pytest.mark.parametrize(
    ("function", "detail"),
    [
        (raises, "the check raised OSError: two lines"),
        (exits, "the check raised SystemExit: 9"),
        (returns_nonsense, "the check returned 'yes', not a DoctorResult"),
    ],
)
def test_checks_are_isolated(monkeypatch: pytest.MonkeyPatch, function: Callable[[], object], detail: str) -> None:
    """Whatever a check does wrong is its own failure, in one line, and the next one runs."""
    use(monkeypatch, wrong=function, good=good)
    document = json.loads(CliRunner().invoke(module.doctor, ["--json"]).stdout)
    assert [(c["ok"], c["detail"]) for c in document["checks"]] == [(False, detail), (True, "fine")]


def test_a_check_whose_code_is_gone_fails() -> None:
    """A check that cannot be imported is a failed check."""
    row = module.run_check(DoctorCheck("gone", "Help.", "mtb_core.no_such_module:check"))
    assert row.ok is False
    assert "no_such_module" in row.detail


def test_a_check_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer within the limit is a failure; the check is left behind."""
    release = threading.Event()
    use(monkeypatch, hangs=release.wait)
    row = module.run_check(check("hangs"), limit_s=0.05)
    release.set()
    assert (row.ok, row.detail) == (False, "no answer after 0.05 s")


def test_own_checks_pass_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a machine where these tests run, python, torch and gloo are fine; none of the checks here raises."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    names = {n: c for n, c in discover(strict=False).doctor_checks.items() if c.impl.startswith("mtb_doctor.")}
    assert set(names) == {"python", "torch", "gloo", "disk", "shm", "plugins", "cuda"}
    rows = {name: module.run_check(found) for name, found in names.items()}
    assert all(rows[name].ok for name in ("python", "torch", "gloo"))
    assert not [row for row in rows.values() if "the check" in row.detail]


def test_gloo_names_the_bad_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interface that does not exist is named, with the variable and those that do exist."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    result = own.check_gloo()
    assert result.ok is False
    assert "GLOO_SOCKET_IFNAME" in result.detail
    assert "nope0" in result.detail
    assert "lo" in result.detail.partition("one of:")[2]


def test_disk_that_cannot_be_written_or_is_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run folder that cannot be written, or has no room, fails and says what to do."""
    monkeypatch.chdir(tmp_path)
    assert own.check_disk().ok is True
    monkeypatch.setattr(own, "_LEAST_DISK_BYTES", 2**70)
    assert "--run-dir" in own.check_disk().detail

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(own.tempfile, "TemporaryFile", refuse)
    result = own.check_disk()
    assert result.ok is False
    assert "Permission denied" in result.detail


def test_small_shared_memory_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Too little shared memory fails with the remedy; none at all does not apply."""
    monkeypatch.setattr(own, "_LEAST_SHM_BYTES", 2**70)
    result = own.check_shm(str(tmp_path))
    assert result.ok is False
    assert "--shm-size" in result.detail
    assert own.check_shm(str(tmp_path / "none")).ok is None


def test_failed_plugins_are_shown_with_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugins check lists each broken plugin and why, and passes when those that remain are active."""
    registry = discover(strict=False)
    active = attrs.evolve(registry, records=registry.records[:1])
    broken = attrs.evolve(registry.records[0], name="x", status="failed", reason="it raised ValueError")
    monkeypatch.setattr(own, "discover", lambda **_: active)
    assert own.check_plugins() == DoctorResult(ok=True, detail="core")
    monkeypatch.setattr(own, "discover", lambda **_: attrs.evolve(active, records=(*active.records, broken)))
    result = own.check_plugins()
    assert result.ok is False
    assert "it raised ValueError" in result.detail


def test_strict_mode_does_not_keep_doctor_from_working(monkeypatch: pytest.MonkeyPatch) -> None:
    """With MTB_STRICT_PLUGINS=1 the command itself asks for no more than there is: it shows the broken plugin."""
    monkeypatch.setenv("MTB_STRICT_PLUGINS", "1")
    seen: list[bool | None] = []

    def spy(*, strict: bool | None = None) -> object:
        seen.append(strict)
        return attrs.evolve(discover(strict=False), doctor_checks={})

    monkeypatch.setattr(module, "discover", spy)
    CliRunner().invoke(module.doctor, ["--json"])
    assert seen == [False]


def test_the_checks_here_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever this plugin stands among the others, its checks come before theirs, each group in its order."""
    registry = discover(strict=False)
    ours = {name: found for name, found in registry.doctor_checks.items() if found.impl.startswith("mtb_doctor.")}
    mixed = {"early": check("early"), **ours, "late": check("late")}
    monkeypatch.setattr(module, "discover", lambda **_: attrs.evolve(registry, doctor_checks=mixed))
    monkeypatch.setattr(module, "load_reference", lambda _: absent)
    names = [row["name"] for row in json.loads(CliRunner().invoke(module.doctor, ["--json"]).stdout)["checks"]]
    assert names == [*ours, "early", "late"]


def test_core_does_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without this distribution core trains, and who asks for `mtb doctor` is told which one has it."""
    monkeypatch.setenv("MTB_DISABLE_PLUGINS", "mtb-doctor")
    monkeypatch.chdir(tmp_path)
    assert main(["train", *SMALL.split()]) == 0
    assert main(["doctor"]) == 2
    assert "no command 'doctor' now: plugin 'doctor' (mtb-doctor" in capsys.readouterr().err
