"""Commands in the documentation work: those that begin with `$ mtb` are run, those with `$ make` have a target.

They stand in fenced blocks marked `console`. Blocks of one page run in order in one temporary folder, so that a later
command finds what an earlier one made. A block that cannot run here, or would take long, has a line above it that says
why: `<!-- not run by the tests: REASON -->`.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click
import pytest

from mtb_core.cli.root import root

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(p for p in ROOT.glob("mtb_*/README.md")),
    *sorted((ROOT / "plugins").glob("*/README.md")),
]
_BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SKIP = re.compile(r"<!-- not run by the tests: .+ -->\s*\Z")


def commands(text: str) -> Iterator[tuple[str, bool]]:
    """(command, whether it is to be run) of each `$` line; a trailing backslash continues a command."""
    for block in _BLOCK.finditer(text):
        run = not _SKIP.search(text[: block.start()])
        lines = block[1].replace("\\\n", " ").splitlines()
        yield from ((line.removeprefix("$ ").strip(), run) for line in lines if line.startswith("$ "))


def pages_with(word: str) -> list[object]:
    """Pages that hold a command which starts with `word`."""
    return [
        pytest.param(page, id=str(page.relative_to(ROOT)))
        for page in PAGES
        if page.exists() and any(command.split()[0] == word for command, _ in commands(page.read_text()))
    ]


#: Pages on a subject of their own, whose commands take tens of seconds: they are slow tests.
LONG = {
    f"docs/{name}.md"
    for name in (
        "communication",
        "compare",
        "conformance",
        "context-parallel",
        "evidence",
        "expert-parallel",
        "guards",
        "moe",
        "pipeline-parallel",
        "profile",
        "tensor-parallel",
    )
} | {f"plugins/mtb_{name}/README.md" for name in ("cp", "ep", "pp", "tp")}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(*found.values, id=found.id, marks=pytest.mark.slow if found.id in LONG else ())
        for found in pages_with("mtb")
    ],
)
def test_mtb_commands_run(page: Path, tmp_path: Path) -> None:
    """Every `mtb` command of the page succeeds, in order, in an empty folder."""
    run_commands(page, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_first_pages_can_be_followed_again(tmp_path: Path) -> None:
    """The commands of README and guide work one page after the other in one folder, and all of them once more."""
    for page in [ROOT / "README.md", ROOT / "docs" / "guide.md"] * 2:
        run_commands(page, tmp_path)


def run_commands(page: Path, folder: Path) -> None:
    """Run the `mtb` commands of a page in `folder`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command, run in commands(page.read_text(encoding="utf-8")):
        if run and command.split()[0] == "mtb":
            done = subprocess.run(
                ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", pages_with("mtb"))
def test_mtb_commands_are_understood(page: Path) -> None:
    """Every `mtb` command of the page, also one that is not run, names commands and options that there are.

    The files that it names need not be there.
    """
    for command, _ in commands(page.read_text(encoding="utf-8")):
        words = shlex.split(command, comments=True)
        if words[0] == "mtb":
            end = next((index for index, word in enumerate(words) if set(word) & set("|<>;&$")), len(words))
            try:
                with suppress(click.exceptions.Exit):  # of an option that is answered at once
                    understand(root, "mtb", words[1:end])
            except click.UsageError as error:
                if "does not exist" not in error.format_message():
                    pytest.fail(f"{command}\n{error.format_message()}")


def understand(command: click.Command, name: str, words: list[str]) -> None:
    """Parse `words` as `command` does, down to the last subcommand, and run nothing."""
    with command.make_context(name, [*words]) as context:
        rest = [*context._protected_args, *context.args]
        if isinstance(command, click.Group) and rest:
            name, child, rest = command.resolve_command(context, rest)
            assert child is not None
            understand(child, str(name), rest)


@pytest.mark.parametrize("page", pages_with("make"))
def test_make_commands_exist(page: Path) -> None:
    """Every `make` command of the page names targets that the Makefile has."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for command, _ in commands(page.read_text(encoding="utf-8")):
        words = command.split()
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, command


def test_commands_are_found() -> None:
    """The reader of pages sees commands, continuations and marks, and nothing outside of console blocks."""
    text = """
```console
$ mtb train --steps 1 \\
    --seed 2
loss 3
```
<!-- not run by the tests: takes an hour -->

```console
$ mtb train
```
```sh
$ rm x
```
"""
    assert [(" ".join(c.split()), run) for c, run in commands(text)] == [
        ("mtb train --steps 1 --seed 2", True),
        ("mtb train", False),
    ]
