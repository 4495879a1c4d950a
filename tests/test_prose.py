"""Docstrings open with a subject, a verb or a noun, not with a bare relative clause."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OPENING = re.compile(r"(What|Where|Who|Whether|Why|How|When|Which|That|Whichever|Whatever)\b")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
#: Docstrings that still open so, by package; all others have none. A number may only go down.
LEFT = {
    "benchmarks": 20,
    "docs": 1,
    "mtb_core/tests": 56,
    "mtb_ddp": 2,
    "mtb_deepspeed": 7,
    "mtb_fsdp": 8,
    "plugins/mtb_checkpoint": 2,
    "plugins/mtb_data": 2,
    "plugins/mtb_dcp": 3,
    "plugins/mtb_doctor": 1,
    "plugins/mtb_ep": 3,
    "plugins/mtb_evidence": 5,
    "plugins/mtb_guards": 3,
    "plugins/mtb_kit": 1,
    "plugins/mtb_launcher": 5,
    "plugins/mtb_pp": 1,
    "plugins/mtb_profile": 57,
    "plugins/mtb_report": 94,
    "plugins/mtb_tp": 9,
    "tests": 32,
}


def sources() -> Iterator[Path]:
    """Every module of the repository."""
    skipped = {".venv", ".venv-bench", "build", "runs", "data", "__pycache__"}
    for path in sorted(ROOT.rglob("*.py")):
        if not skipped & set(path.relative_to(ROOT).parts[:1]) and "build" not in path.parts:
            yield path


def package(path: Path) -> str:
    """The package of a module; core's tests count apart."""
    parts = path.relative_to(ROOT).parts
    two = parts[0] == "plugins" or parts[:2] == ("mtb_core", "tests")
    return "/".join(parts[:2] if two else parts[:1])


def openings(path: Path) -> list[str]:
    """First lines of docstrings that open with a relative clause."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
    return [text.partition("\n")[0] for text in texts if OPENING.match(text)]


def test_docstrings_open_with_a_subject_or_a_verb() -> None:
    """A package has no more bare openings than are listed, and the list has no room to spare."""
    found: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for path in sources():
        for line in openings(path):
            found[package(path)] += 1
            examples[package(path)] = f"{path.relative_to(ROOT)}: {line}"
    wrong = {
        name: (found[name], LEFT.get(name, 0), examples.get(name, "lower the number"))
        for name in found.keys() | LEFT.keys()
        if found[name] != LEFT.get(name, 0)
    }
    assert not wrong, f"(there are, LEFT says, an example): {wrong}"


@pytest.mark.parametrize("text", ["What it holds.", "Whether it fits.", "Where it lies."])
def test_bare_openings_are_seen(text: str, tmp_path: Path) -> None:
    """The test itself notices them."""
    (tmp_path / "module.py").write_text(f'"""{text}"""\n')
    assert openings(tmp_path / "module.py") == [text]
