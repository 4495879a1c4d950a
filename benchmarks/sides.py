"""Two commits of this repository, each installed in an environment of its own; used by `side_by_side.py`.

An environment holds what the current one holds of other projects, as links, and the packages of one commit as pip
installs them. Nothing is downloaded, and nothing is left in the repository: a commit's files come out of
``git archive``, those of the working tree by way of an index and an object store in the temporary folder.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

#: What an environment must not take over from the current one: packages of this repository, and files that change the path.
_OWN = re.compile(r"_*(mtb[_-]|minitrainbench|editable)|.*\.pth$|__pycache__$")
_GRACE_S = 10.0


class Unusable(Exception):
    """A side cannot be made, or a command on it did not end as it must; the text is for people."""


@attrs.frozen
class Tree:
    """Files of the repository.

    Attributes:
        tree: what git knows them by.
        label: how they are shown.
        env: the variables with which git finds them.
    """

    tree: str
    label: str
    env: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen
class Ran:
    """A command that has ended: its exit code, its output, the time of its start (Unix, s) and its duration (s)."""

    returncode: int
    stdout: str
    stderr: str
    started: float
    seconds: float


@attrs.frozen
class Side:
    """One of the two: `name` is ``base`` or ``head``, `label` says which commit it is, `bin` has its commands."""

    name: str
    label: str
    bin: Path

    def command(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """``mtb`` of this side with `arguments`, and an environment in which it sees no other package of ours."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("MTB_", "PYTHON", "GIT_", "VIRTUAL_ENV"))}
        env |= {"PATH": f"{self.bin}{os.pathsep}{env.get('PATH', '')}", "PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1"}
        return [str(self.bin / "mtb"), *arguments], env

    def mtb(self, arguments: Sequence[str], cwd: Path, timeout_s: float) -> Ran:
        """Run ``mtb`` of this side.

        Raises:
            Unusable: it has not ended after `timeout_s`.
        """
        command, env = self.command(arguments)
        return finish(command, cwd, env, timeout_s)

    def document(self, arguments: Sequence[str], cwd: Path, timeout_s: float) -> tuple[str, Ran]:
        """As `mtb`, for a command that must succeed; its standard output comes first.

        Raises:
            Unusable: it failed, with the end of what it said.
        """
        ran = self.mtb(arguments, cwd, timeout_s)
        if ran.returncode:
            said = " ".join(ran.stderr.split()[-60:])
            raise Unusable(f"{self.name}: `mtb {' '.join(arguments)}` ended with {ran.returncode}: {said}")
        return ran.stdout, ran


def commit(repository: Path, revision: str) -> Tree:
    """The files of a commit.

    Raises:
        Unusable: there is none of that name.
    """
    try:
        found = _git(repository, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except Unusable:
        raise Unusable(f"{revision!r} is no commit of this repository; name one that `git log --all` shows.") from None
    return Tree(found, _git(repository, "rev-parse", "--short", found))


def working_tree(repository: Path, scratch: Path) -> Tree:
    """The files of the working tree as they are now, with those not yet added, without those that git ignores.

    Args:
        repository: the working tree.
        scratch: a folder for git's index and objects; the repository's own stay as they are.
    """
    scratch.mkdir(parents=True)
    objects = repository / _git(repository, "rev-parse", "--git-path", "objects")
    (scratch / "objects").mkdir()
    env = {
        "GIT_INDEX_FILE": str(scratch / "index"),
        "GIT_OBJECT_DIRECTORY": str(scratch / "objects"),
        "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(objects),
    }
    _git(repository, "read-tree", "HEAD", env=env)
    _git(repository, "add", "--all", env=env)
    tree = _git(repository, "write-tree", env=env)
    short = _git(repository, "rev-parse", "--short", "HEAD")
    changed = " with changes" if tree != _git(repository, "rev-parse", "HEAD^{tree}") else ""
    return Tree(tree, f"working tree at {short}{changed}", env)


def unpack(repository: Path, tree: Tree, folder: Path) -> None:
    """Write the files of `tree` into the new `folder`."""
    packed = _run_git(repository, ["archive", "--format=tar", tree.tree], tree.env)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")


def install(name: str, repository: Path, tree: Tree, folder: Path) -> Side:
    """Install all packages of `tree` in an environment in the new `folder`.

    Raises:
        Unusable: pip could not.
    """
    unpack(repository, tree, folder / "source")
    where = folder / "env"
    venv.create(where, symlinks=True)
    _link_others(where)
    packages = projects(folder / "source")
    if not packages:
        raise Unusable(f"{tree.label} has no packages: no folder of it, or of its plugins/, has a pyproject.toml.")
    python = str(where / "bin" / "python")
    options = ["--disable-pip-version-check", "--quiet", "install", "--no-deps", "--no-build-isolation"]
    command = [python, "-m", "pip", *options, *map(str, packages)]
    done = finish(command, folder, dict(os.environ), timeout_s=600)
    if done.returncode:
        raise Unusable(f"pip could not install the packages of {tree.label}: {done.stderr.strip()[-2000:]}")
    return Side(name, tree.label, where / "bin")


def projects(source: Path) -> list[Path]:
    """The folders of the packages that a tree of this repository holds."""
    found = [*source.glob("*/pyproject.toml"), *source.glob("plugins/*/pyproject.toml")]
    return sorted(p.parent for p in found if "project" in tomllib.loads(p.read_text(encoding="utf-8")))


def finish(command: Sequence[str], cwd: Path, env: Mapping[str, str], timeout_s: float) -> Ran:
    """Run a command to its end. It is ended, with all that it started, if it takes too long or this process is stopped.

    Raises:
        Unusable: it has not ended after `timeout_s`.
    """
    began, clock = time.time(), time.monotonic()
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        try:
            out, err = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            end(child)
            raise Unusable(f"`{' '.join(command)}` has not ended after {timeout_s:g} s.") from None
        except BaseException:
            end(child)
            raise
    return Ran(child.returncode, out, err, began, time.monotonic() - clock)


def end(child: subprocess.Popen[str]) -> None:
    """End a process and its group, also a stopped one, first by a request."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
            os.killpg(child.pid, signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=_GRACE_S)
            return


def _link_others(where: Path) -> None:
    """Link what the current interpreter finds of other projects; the first on the path counts, as in an import."""
    (target,) = where.glob("lib/python3*/site-packages")
    for entry in sys.path:
        if Path(entry).name not in ("site-packages", "dist-packages") or not Path(entry).is_dir():
            continue
        for found in Path(entry).iterdir():
            link = target / found.name
            if not _OWN.match(found.name) and not os.path.lexists(link):
                link.symlink_to(found)


def _git(repository: Path, *arguments: str, env: Mapping[str, str] | None = None) -> str:
    return _run_git(repository, arguments, env or {}).decode().strip()


def _run_git(repository: Path, arguments: Sequence[str], env: Mapping[str, str]) -> bytes:
    # Hooks of git set variables that would lead elsewhere.
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    done = subprocess.run(["git", *arguments], cwd=repository, env={**clean, **env}, capture_output=True, check=False)
    if done.returncode:
        raise Unusable(f"`git {' '.join(arguments)}` failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
