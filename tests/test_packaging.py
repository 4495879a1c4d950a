"""The distributions: what their projects declare, and what their wheels hold."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: The distribution that has no code and installs the others.
META = ROOT / "plugins" / "minitrainbench"
FOUND = [p.parent for p in [*ROOT.glob("*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")]]
PROJECTS = sorted(folder for folder in FOUND if folder != META)


def declared(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


def subpackages(folder: Path) -> set[str]:
    """Packages that are there, by dotted name, tests left out."""
    found = (p.parent.relative_to(folder.parent).parts for p in folder.rglob("__init__.py"))
    return {".".join(parts) for parts in found if not {"tests", "build"} & set(parts)}


def data(folder: Path) -> set[str]:
    """Files other than modules that a project declares, as a wheel names them."""
    found: set[str] = set()
    for package, patterns in declared(folder)["tool"]["setuptools"]["package-data"].items():
        place = folder.parent.joinpath(*package.split("."))
        found |= {p.relative_to(folder.parent).as_posix() for pattern in patterns for p in place.glob(pattern)}
    return found


@pytest.mark.parametrize("folder", PROJECTS, ids=lambda p: p.name)
def test_package_lists_are_complete(folder: Path) -> None:
    """Every subpackage is listed by hand in the project, and none that is not there."""
    assert set(declared(folder)["tool"]["setuptools"]["packages"]) == subpackages(folder)


@pytest.mark.parametrize("folder", PROJECTS, ids=lambda p: p.name)
def test_projects_declare_what_the_others_do(folder: Path) -> None:
    """Name, license, Python versions, typing mark and read-me are alike; the version is core's."""
    project = declared(folder)["project"]
    assert project["name"] == folder.name.replace("_", "-")
    assert project["license"] == "Apache-2.0"
    assert project["requires-python"] == ">=3.11,<3.14"
    assert project["version"] == declared(ROOT / "mtb_core")["project"]["version"]
    assert (folder / "README.md").is_file()
    assert (folder / "py.typed").is_file()
    assert declared(folder)["tool"]["setuptools"]["package-data"][folder.name] == ["py.typed"]
    assert set(project.get("entry-points", {})) - {"pytest11"} == {"mtb"}


@pytest.mark.parametrize("folder", PROJECTS, ids=lambda p: p.name)
def test_dependencies_are_pinned_for_the_set_up(folder: Path) -> None:
    """What a project depends on has a version in constraints.txt, which every set-up uses."""
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    }
    needed = {re.match(r"[\w.-]+", text)[0].lower() for text in declared(folder)["project"]["dependencies"]}
    assert {name for name in needed if not name.startswith("mtb-")} <= pinned


def test_minitrainbench_installs_every_package() -> None:
    """It needs what the demo uses, its extra `all` the rest, each in the version of this repository."""
    project = declared(META)["project"]
    needed, more = project["dependencies"], project["optional-dependencies"]["all"]
    version = declared(ROOT / "mtb_core")["project"]["version"]
    assert project["version"] == version
    assert sorted(needed + more) == sorted(f"{folder.name.replace('_', '-')}=={version}" for folder in PROJECTS)
    demo = {"mtb-core", "mtb-launcher", "mtb-data", "mtb-ddp", "mtb-evidence"}
    assert demo <= {text.partition("==")[0] for text in needed}


def test_makefile_and_tools_know_every_package() -> None:
    """A new package must be in the Makefile, and its tests in pytest's paths."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    listed = re.search(r"^PACKAGES := (.*)$", makefile, re.MULTILINE)[1].split()
    assert set(listed) == {str(folder.relative_to(ROOT)) for folder in PROJECTS}
    paths = declared(ROOT)["tool"]["pytest"]["ini_options"]["testpaths"]
    assert {f"{name}/tests" for name in listed} | {"tests"} == set(paths)


@pytest.mark.slow
@pytest.mark.parametrize("folder", PROJECTS, ids=lambda p: p.name)
def test_wheels_hold_every_module_and_no_tests(folder: Path, tmp_path: Path) -> None:
    """A wheel holds the modules, the declared data and the entry points of its package, and nothing else."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")
    copy = shutil.copytree(folder, tmp_path / folder.name, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path / "wheels"), str(copy)], check=True)
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        entry_points = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "[mtb]" in archive.read(entry_points).decode()
    modules = {
        path.relative_to(folder.parent).as_posix()
        for path in folder.rglob("*.py")
        if not {"tests", "build", "__pycache__"} & set(path.relative_to(folder).parts)
    }
    assert files == modules | data(folder)
