"""The architecture, held by the imports: arrows point one way, plugins use public names, core knows no strategy."""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import mtb_core
import mtb_core.ckpt
import mtb_core.launch

ROOT = Path(__file__).parent.parent
CORE = ROOT / "mtb_core"

#: Parts of core from left to right; a part imports from its own column or from those to the left of it.
COLUMNS = (
    {"api"},
    {"registry", "config", "ranks", "model", "data"},
    {"train", "ckpt", "measure", "launch"},
    {"running", "launching"},
    {"cli", "testing"},
    {"__main__"},
)
COLUMN = {part: i for i, parts in enumerate(COLUMNS) for part in parts}
#: Core's own plugin is a plugin like any other: nothing imports it by name but the command line, which must list
#: core's commands without loading a stranger's plugin.
BUILTIN = "builtin"
PLUGINS = [
    CORE / BUILTIN,
    *(ROOT / name for name in ("mtb_ddp", "mtb_fsdp", "mtb_deepspeed", "mtb_comm")),
    *sorted(p.parent for p in ROOT.glob("plugins/*/plugin.py")),
]
#: Distributions that look inside core, and therefore need exactly its version; see docs/decisions/0017.
IN_STEP = {"mtb_checkpoint", "mtb_data", "mtb_doctor", "mtb_evidence", "mtb_kit"}
STRATEGIES = {"single", "ddp", "fsdp", "fsdp1", "deepspeed", "tp", "localsgd", "megatron"}


def sources(folder: Path) -> list[Path]:
    """The modules below `folder`, tests left out."""
    skipped = {"tests", "build", "__pycache__"}
    return [p for p in sorted(folder.rglob("*.py")) if not skipped & set(p.relative_to(folder).parts)]


def runtime_imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements, those for type checkers only left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from runtime_imports(other)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        else:
            yield from runtime_imports(node)


def imported(path: Path, *, within: Path = ROOT) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything that the module at `path` imports when it runs.

    ``from a import b`` gives ``a.b``, whether b is a module or a name in one.
    """
    package = ".".join(path.relative_to(within).parts[:-1])
    for node in runtime_imports(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
            continue
        base = node.module or ""
        if node.level:
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, *filter(None, [base])])
        yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def part_of(name: str) -> str | None:
    """The part of core that an imported name is in; names of `mtb_core` itself are the contract's, or stand for running."""
    words = name.split(".")
    if words[0] != "mtb_core":
        return None
    part = words[1] if len(words) > 1 else "api"
    if part in COLUMN or part == BUILTIN:
        return part
    origin = {name: module.split(".")[1] for name, module in mtb_core._LAZY.items()}
    return origin.get(part, "api")


def test_arrows_in_core_point_left() -> None:
    """No part of core imports from a part to the right of it, nor in a circle."""
    wrong, graph = [], graphlib.TopologicalSorter[str]()
    for path in sources(CORE):
        part = path.relative_to(CORE).parts[0].removesuffix(".py")
        if part in {BUILTIN, "__init__"}:
            continue
        for line, name in imported(path):
            other = part_of(name)
            if other is None or other == part:
                continue
            if other == BUILTIN:
                if part != "cli":
                    wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}, core's own plugin")
                continue
            if COLUMN[other] > COLUMN[part]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}, which is to the right of {part}")
            graph.add(part, other)
    assert not wrong
    graph.prepare()  # raises where parts of one column import each other in a circle


def test_every_part_of_core_has_a_place() -> None:
    """A new subpackage of core must be given its column here."""
    parts = {p.parent.name for p in CORE.glob("*/__init__.py")} | {p.stem for p in CORE.glob("*.py")}
    assert parts - {"tests", "__init__", BUILTIN} <= set(COLUMN)


def declared(folder: Path) -> set[str]:
    """Packages of this repository that the project of a plugin depends on; core's own plugin is a part of core."""
    project = folder / "pyproject.toml" if folder.name != BUILTIN else CORE / "pyproject.toml"
    names = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    return {re.match(r"[\w-]+", name)[0].replace("-", "_") for name in names if name.startswith("mtb-")}


def forbidden(folder: Path, own: str, depends_on: set[str], *, within: Path = ROOT) -> list[str]:
    """Imports that the plugin `own`, which declares that it depends on `depends_on`, may not have.

    Allowed are core's public names, those of `mtb_core.ckpt` and `mtb_core.launch` (for authors of checkpoint formats
    and launchers), and those of the plugins that it declares. What is released in step with core may import anything of core.
    """
    public = {
        f"{package}.{name}"
        for package in {"mtb_core", "mtb_core.ckpt", "mtb_core.launch", *depends_on}
        for name in importlib.import_module(package).__all__
    }
    return [
        f"{path.relative_to(within)}:{line} imports {name}"
        for path in sources(folder)
        for line, name in imported(path, within=within)
        if name.startswith("mtb_") and name not in public and name != own and not name.startswith(f"{own}.")
        if not (own in IN_STEP and name.startswith("mtb_core."))
    ]


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda p: p.name)
def test_plugins_import_public_names_only(folder: Path) -> None:
    """The built-in strategy and sinks, and every plugin here, import what a stranger's plugin may.

    That is, from core and from the plugins in the dependencies of its project, what is in ``__all__``.
    """
    within = folder.parent if folder.parent.name == "plugins" else ROOT
    own = ".".join(folder.relative_to(within).parts)
    assert not forbidden(folder, own, declared(folder) - {"mtb_core"}, within=within)


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        ("from mtb_core import Strategy", True),
        ("from mtb_ddp import wrap_ddp", True),
        ("from mtb_mine.parts import something", True),
        ("from mtb_ddp.wrapping import wrap_ddp", False),
        ("import mtb_ddp.strategy", False),
        ("from mtb_core.train import trainer", False),
        ("from mtb_fsdp import wrap_fsdp", False),
    ],
)
def test_a_plugin_builds_on_declared_ones_only(line: str, allowed: bool, tmp_path: Path) -> None:
    """Public names of a declared plugin may be imported; those of another, and what is inside of one, may not."""
    folder = tmp_path / "mtb_mine"
    folder.mkdir()
    (folder / "strategy.py").write_text(f"def late():\n    {line}\n")
    assert bool(forbidden(folder, "mtb_mine", {"mtb_ddp"}, within=tmp_path)) is not allowed


@pytest.mark.parametrize("name", sorted(IN_STEP))
def test_what_looks_inside_core_needs_its_version(name: str) -> None:
    """Otherwise an update of core alone would break it."""
    project = tomllib.loads((ROOT / "plugins" / name / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"mtb-core=={project['version']}" in project["dependencies"]
    assert project["version"] == mtb_core.__version__


def test_plugins_depend_on_each_other_without_a_circle() -> None:
    """What a plugin declares is here, is what it imports, and does not depend on it in turn."""
    graph = {folder.name: declared(folder) - {"mtb_core"} for folder in PLUGINS if folder.name != BUILTIN}
    assert graph["mtb_tp"] == {"mtb_ddp", "mtb_evidence", "mtb_fsdp"}
    for folder in PLUGINS:
        within = folder.parent if folder.parent.name == "plugins" else ROOT
        used = {name.split(".")[0] for path in sources(folder) for _, name in imported(path, within=within)}
        assert graph.get(folder.name, set()) <= used & set(graph), f"{folder.name} declares what it does not import"
    graphlib.TopologicalSorter(graph).prepare()  # raises where they are in a circle


def compared_strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """String constants that something is compared with, looked up by, or matched against."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            places: list[ast.AST] = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            places = [node.value]
        elif isinstance(node, ast.Dict):
            places = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.Subscript):
            places = [node.slice]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in {"startswith", "endswith", "get"}:
            places = list(node.args[:1])
        else:
            continue
        for place in places:
            for leaf in ast.walk(place):
                if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str):
                    yield node.lineno, leaf.value


def test_core_never_branches_on_a_strategys_name() -> None:
    """Differences between strategies live in a plan or a method, never in a comparison with a name."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} asks for {text!r}"
        for path in sources(CORE)
        for line, text in compared_strings(ast.parse(path.read_text(encoding="utf-8")))
        if text in STRATEGIES
    ]
    assert not wrong


def test_core_knows_no_engine_of_others() -> None:
    """Neither DeepSpeed's name nor one of the attributes that it puts on parameters stands in a module of core."""
    word = re.compile(r"deepspeed|\bds_\w+", re.IGNORECASE)
    found = {str(path.relative_to(ROOT)): word.findall(path.read_text(encoding="utf-8")) for path in sources(CORE)}
    assert not {path: words for path, words in found.items() if words}


def test_core_names_no_plugin_package() -> None:
    """Core imports no plugin package, not even inside a function."""
    names = {folder.name for folder in PLUGINS} - {BUILTIN}
    for path in sources(CORE):
        assert not [name for _, name in imported(path) if name.split(".")[0] in names], path


def test_discovery_loads_no_heavy_package() -> None:
    """Finding every installed plugin, and reading the configuration, imports neither torch nor numpy nor rich."""
    code = """
import sys
import mtb_core, mtb_core.config, mtb_core.cli
from mtb_core.registry.discovery import discover
registry = discover()
assert registry.strategies and registry.sinks
print(sorted({"torch", "numpy", "rich", "tensorboard"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240)
    assert done.stdout == "[]\n", done.stderr


#: A module that builds on another one, which asks for it where a checkpoint is old.
KNOWN_CIRCLE = ("mtb_core.ckpt.opened", "mtb_core.ckpt.versions")


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports inside functions count too; a package that names its modules for later does not."""
    modules = {}
    for folder in [CORE, *PLUGINS]:
        within = folder.parent if folder.parent.name == "plugins" else ROOT
        for path in sources(folder):
            name = ".".join(path.relative_to(within).with_suffix("").parts).removesuffix(".__init__")
            modules[name] = {found for _, found in imported(path, within=within)}
    graph = graphlib.TopologicalSorter[str]()
    for name, found in modules.items():
        used = {other if other in modules else other.rpartition(".")[0] for other in found} & modules.keys() - {name}
        graph.add(
            name, *(other for other in used if not name.startswith(f"{other}.") and (name, other) != KNOWN_CIRCLE)
        )
    graph.prepare()  # raises where there is a circle
