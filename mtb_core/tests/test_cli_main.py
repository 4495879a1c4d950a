"""Tests of mtb_core.cli: exit codes, laziness, suggestions, and broken plugins from the outside."""

import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import click
import pytest

from mtb_core import __version__, cli
from mtb_core.api import CheckFailed, CommandInfo, ConfigError, RunFailed
from mtb_core.cli import main, root

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
HEAVY = ("torch", "numpy", "rich", "importlib.metadata")


def mtb(*arguments, path=None, env=None, **kwargs):
    """Run ``python -m mtb_core`` in a process of its own."""
    environment = {**os.environ, **(env or {})}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, "-m", "mtb_core", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False, **kwargs)


@pytest.fixture
def command(monkeypatch):
    """``command(function)``: make ``mtb doctor`` call `function`, and run it in this process."""

    def run(function, *arguments):
        module = types.ModuleType("mtb_test_command")
        module.command = click.command(name="doctor")(function)
        monkeypatch.setitem(sys.modules, "mtb_test_command", module)
        info = CommandInfo("doctor", "A test's.", "mtb_test_command:command")
        monkeypatch.setattr(root, "mtb_commands", lambda: [info])
        return main([*arguments, "doctor"])

    return run


def fail_with(error):
    def function():
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("wrong value 3"), 2, "mtb: error: wrong value 3\n"),
        (RunFailed("rank 1 died"), 3, "mtb: error: rank 1 died\n"),
        (CheckFailed("digest differs"), 1, "mtb: error: digest differs\n"),
        (click.UsageError("which one?"), 2, "mtb: error: which one?"),
        (click.exceptions.Exit(7), 7, ""),
        (KeyboardInterrupt(), 130, "mtb: interrupted.\n"),
        (click.Abort(), 130, "mtb: interrupted.\n"),
    ],
)
def test_exit_codes(error, code, text, command, capsys):
    """Each error has its code, and is one paragraph on stderr without a traceback."""
    assert command(fail_with(error)) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(text)
    assert "Traceback" not in captured.err


SLOW_TORCH = """
import sys, time
print("importing", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("environment", "code"), [({}, 4), (TORCHRUN, 0)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_while_torch_is_imported(number, environment, code, tmp_path):
    """Before anything listens for stop signals the exit code is that of a stop, too; torchrun's worker leaves with 0."""
    (tmp_path / "torch.py").write_text(SLOW_TORCH)
    command = [sys.executable, "-m", "mtb_core", "train", "--nproc", "2", "--strategy", "single"]
    env = {**os.environ, **environment, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        assert process.communicate()[1] == f"mtb: stopped by {number.name}.\n"
    assert process.returncode == code


def test_a_stop_while_a_plugin_is_imported(install, capsys):
    """It is not taken for the plugin's own failure."""
    install("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)")
    assert main(["plugins", "list"]) == 4
    assert capsys.readouterr().err == "mtb: stopped by SIGTERM.\n"


SLOW_TO_LEAVE = """
import atexit, time
@atexit.register
def leave():
    print("leaving", flush=True)
    time.sleep(1)
try:
    print("importing", flush=True)
    time.sleep(60)
finally:
    print("tidying", flush=True)
    time.sleep(1)
    print("tidied", flush=True)
"""


def test_a_stop_that_is_signalled_again_keeps_its_code(tmp_path):
    """Whether it comes again while things are tidied up, or while the interpreter ends."""
    (tmp_path / "torch.py").write_text(SLOW_TO_LEAVE)
    command = [sys.executable, "-m", "mtb_core", "train"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        for place in ("importing", "tidying", "tidied", "leaving"):
            assert process.stdout.readline() == f"{place}\n"
            if place != "tidied":
                process.send_signal(signal.SIGTERM)
        assert process.communicate()[1] == "mtb: stopped by SIGTERM.\n"
    assert process.returncode == 4


def test_handlers_come_back(command):
    """A stop signal ends a command with code 4, and its caller has the former handlers again."""
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)]
    assert command(lambda: os.kill(os.getpid(), signal.SIGTERM)) == 4
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)] == before


def test_a_group_alone_shows_its_help(capsys):
    """A group of commands, core's or a plugin's, without one of them: its help on stderr, no "error", code 2."""
    all_of_them = root.root
    groups = [n for n in all_of_them.list_commands(None) if isinstance(all_of_them.get_command(None, n), click.Group)]
    assert {"checkpoint", "plugins"} <= set(groups)
    for name in groups:
        assert main([name]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"Usage: mtb {name} ")
        assert "Commands:" in captured.err


def test_debug_shows_the_traceback(command, capsys):
    """With --debug the traceback precedes the message."""
    assert command(fail_with(ConfigError("wrong value 3")), "--debug") == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_defect_shows_its_traceback(command, capsys):
    """An exception that is meant for nobody is a defect: traceback, and code 3."""
    assert command(fail_with(ZeroDivisionError("ours"))) == 3
    err = capsys.readouterr().err
    assert "ZeroDivisionError: ours" in err
    assert "defect" in err


@pytest.mark.parametrize(("value", "code"), [(None, 0), (4, 4), ("text", 0)])
def test_what_a_command_returns(value, code, command):
    """A whole number is the exit code."""
    assert command(lambda: value) == code


def test_a_command_that_cannot_be_imported(monkeypatch, capsys):
    """The cause is told, and the code is that of wrong usage."""
    monkeypatch.setattr(root, "mtb_commands", lambda: [CommandInfo("doctor", "x", "not_there_at_all:command")])
    assert main(["doctor"]) == 2
    assert "No module named 'not_there_at_all'" in capsys.readouterr().err
    monkeypatch.setattr(root, "mtb_commands", lambda: [CommandInfo("doctor", "x", "os:sep")])
    assert main(["doctor"]) == 2
    assert "is no click command" in capsys.readouterr().err


def test_a_plugins_command(install, capsys):
    """A plugin's command is listed under its heading without being imported, and imported when it is called."""
    install(
        """
        import click

        @hookimpl
        def mtb_commands():
            return [CommandInfo("hello", "Greets.", __name__ + ":hello", "Greetings")]

        def __getattr__(name):
            if name == "hello":
                print("imported")
                return click.command()(lambda: click.echo("hello there"))
            raise AttributeError(name)
        """
    )
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert "Greetings:\n  hello  Greets.\n" in listed
    assert "imported" not in listed
    assert main(["hello"]) == 0
    assert capsys.readouterr().out == "imported\nhello there\n"


def test_alone_it_says_what_to_do_next(capsys):
    """`mtb` shows commands to try, and exits 0."""
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "mtb train" in out
    assert "mtb --help" in out


def test_version(capsys):
    """`mtb --version` shows core's and torch's."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"mtb {__version__} (torch 2.")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["trian"], "Unknown command 'trian'. Did you mean 'train'?"),
        (["plugins", "lst"], "Did you mean 'list'?"),
        (["train", "--bath-size", "3"], "--batch-size"),
        (["--verison"], "--version"),
        (["train", "--strategy", "singel"], "Did you mean 'single'?"),
        (["train", "--precision", "bf61"], "Did you mean 'bf16'?"),
    ],
)
def test_suggestions(arguments, text, capsys):
    """Misspelt commands, options, strategies and values get a suggestion, and exit code 2."""
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert text in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [["--help"], [], ["--version"], ["plugins", "list"], ["plugins", "show", "single"], ["train", "--help"]],
)
def test_light(arguments):
    """What only shows something imports no torch, no numpy and no rich."""
    heavy = HEAVY[:3] if arguments == ["--version"] else HEAVY
    code = f"import sys; from mtb_core.cli import main; c = main({arguments}); print(c, [m for m in {heavy} if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert ran.stdout.splitlines()[-1] == "0 []"


def test_a_broken_plugin_from_the_outside(install, strategy_body, tmp_path):
    """--help, list and unrelated commands work, with one warning; naming the broken plugin gives 2 and the cause."""
    site = install("raise ImportError('libnccl.so.9 not found')", entry="broken", dist="mtb-broken", version="0.7")
    warning = "mtb: warning: plugin 'broken' (mtb-broken 0.7) could not be loaded:"
    helped = mtb("--help", path=site)
    assert helped.returncode == 0
    assert helped.stderr.count(warning) == 1
    assert "train" in helped.stdout

    listed = mtb("plugins", "list", "--json", path=site, env={"MTB_STRICT_PLUGINS": ""})
    assert listed.returncode == 0
    rows = {row["name"]: row for row in json.loads(listed.stdout)["plugins"]}
    assert rows["broken"]["status"] == "failed"
    assert "libnccl.so.9 not found" in rows["broken"]["reason"]
    assert rows["core"]["status"] == "active"

    unrelated = mtb("init", "x.toml", path=site, cwd=tmp_path)
    assert (unrelated.returncode, unrelated.stderr) == (0, "")

    named = mtb("train", "--strategy", "broken", path=site, cwd=tmp_path)
    assert named.returncode == 2
    assert "libnccl.so.9 not found" in named.stderr.splitlines()[-1]
    assert named.stderr.count(warning) == 1

    without = mtb("train", "--no-plugin", "broken", "--strategy", "broken", path=site, cwd=tmp_path)
    assert without.returncode == 2
    assert warning not in without.stderr
    assert "switched off by --no-plugin" in without.stderr

    trained = mtb("train", "--steps", "1", "--d-model", "16", "--n-layers", "1", "--quiet", path=site, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert trained.stderr.count(warning) == 1

    strict = mtb("plugins", "list", path=site, env={"MTB_STRICT_PLUGINS": "1"})
    assert strict.returncode == 2
    assert "broken" in strict.stdout


def test_a_reader_that_goes_away():
    """`mtb … | head` ends quietly."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        command = [sys.executable, "-m", "mtb_core", "plugins", "list"]
        ran = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, timeout=240, check=False)
    assert ran.returncode == cli.EXIT_BROKEN_PIPE
    assert "Traceback" not in ran.stderr
    assert "BrokenPipe" not in ran.stderr


#: `mtb`, with a `run` that needs no torch.
WITH_A_RUN = """
import sys, types
from mtb_core.cli import main
from mtb_core.measure.result import Result
def run(config, *, quiet):
    return Result(exit_reason="stopped", strategy="single", strategy_options={}, world_size=1, precision="fp32")
sys.modules["mtb_core.running"] = types.SimpleNamespace(run=run, reports_here=lambda: True)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_closed_stdout(form):
    """`mtb train >&-`: the result is not shown, and the exit code is the run's."""
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", WITH_A_RUN, "train", *form]
    ran = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=240, check=False)
    assert (ran.returncode, ran.stderr) == (4, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_result_on_a_full_disk(form, unbuffered, monkeypatch):
    """`mtb train >/dev/full`: one line says that the output cannot be written."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", WITH_A_RUN, "train", *form]
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=240, check=False)
    assert (ran.returncode, ran.stderr) == (3, "mtb: error: cannot write the output: No space left on device.\n")


def test_another_error_of_the_system_is_a_defect(command, capsys):
    """Only output that cannot be written is told as such."""
    assert command(fail_with(OSError(28, "No space left on device"))) == 3
    assert "defect" in capsys.readouterr().err


def test_a_full_disk_behind_stdout():
    """Output that cannot be written is an error, not silence."""
    device = Path("/dev/full")
    if not device.exists():
        pytest.skip("there is no /dev/full here")
    with device.open("w") as full:
        command = [sys.executable, "-m", "mtb_core", "--version"]
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=240, check=False)
    assert ran.returncode == 3
    assert ran.stderr == "mtb: error: cannot write the output: No space left on device.\n"


@pytest.mark.parametrize(
    ("command", "name"),
    [("checkpoint list", "checkpoint"), ("data info", "data"), ("doctor", "doctor"), ("plugins check", "kit")],
)
def test_a_command_that_is_not_installed_says_what_to_install(command, name, capsys, monkeypatch):
    """Core alone knows which of our distributions has it."""
    monkeypatch.setattr("mtb_core.registry.discovery.installed", list)
    monkeypatch.setenv("MTB_DISABLE_PLUGINS", f"nothing-but-a-new-key-{name}")
    assert main(command.split()) == 2
    assert f"pip install mtb-{name}." in capsys.readouterr().err


def test_a_broken_plugin_does_not_end_the_doctor(monkeypatch, capsys, install):
    """With MTB_STRICT_PLUGINS=1 too: it is there to tell what is broken."""
    install("raise ZeroDivisionError", entry="broken", dist="mtb-broken")
    monkeypatch.setenv("MTB_STRICT_PLUGINS", "1")
    main(["doctor"])
    assert "mtb-broken" in capsys.readouterr().out


def test_a_kit_that_is_switched_off_is_named(capsys, monkeypatch):
    """A command in a group of core's says why it is not there, as others do."""
    monkeypatch.setenv("MTB_DISABLE_PLUGINS", "kit")
    assert main(["plugins", "check", "ddp"]) == 2
    assert "There is no command 'plugins check' now: plugin 'kit'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("mtb tr", ["plain,train"]),
        ("mtb train --device c", ["plain,cpu", "plain,cuda"]),
        ("mtb train --st", ["plain,--strategy", "plain,--strategy-opt", "plain,--start-method", "plain,--steps"]),
        ("mtb train --strategy sin", ["plain,single"]),
        ("mtb train --data syn", ["plain,synthetic", "file,syn"]),
        ("mtb train --resume l", ["plain,latest", "file,l"]),
        ("mtb train --config my", ["file,my"]),
    ],
)
def test_a_shell_completes(monkeypatch, capfd, line, offered):
    """A shell is answered with commands, names that plugins provide, choices and files, and with nothing else."""
    words = line.split()
    for name, value in {"": "bash_complete", "WORDS": line, "CWORD": str(len(words) - 1)}.items():
        monkeypatch.setenv(f"COMP_{name}" if name else cli.COMPLETION, value)
    assert main([]) == 0
    assert capfd.readouterr() == ("".join(f"{item}\n" for item in offered), "")


def test_a_shell_asks_for_its_script(monkeypatch, capfd):
    """The script that a shell reads once asks by the variable that is answered."""
    monkeypatch.setenv(cli.COMPLETION, "zsh_source")
    assert main([]) == 0
    assert f"{cli.COMPLETION}=zsh_complete mtb" in capfd.readouterr().out
