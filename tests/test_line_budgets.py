"""No part of core grows unnoticed: each has a budget of lines, and the budgets follow when the parts shrink.

Why, and the reasons for what was raised: docs/decisions/0013-line-budgets.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RECORD = "docs/decisions/0013-line-budgets.md"

#: The most lines that the modules of a folder, and of the folders in it, may have together; tests do not count.
BUDGETS = {
    "mtb_core/*.py": 525,
    "mtb_core/api": 1840,
    "mtb_core/builtin": 380,
    "mtb_core/ckpt": 3560,
    "mtb_core/cli": 985,
    "mtb_core/config": 840,
    "mtb_core/data": 965,
    "mtb_core/launch": 620,
    "mtb_core/measure": 990,
    "mtb_core/model": 840,
    "mtb_core/ranks": 1310,
    "mtb_core/registry": 1150,
    "mtb_core/testing": 22,
    "mtb_core/train": 2400,
    "mtb_core": 16200,
    "all packages": 53400,
}
#: By how many percent a budget may lie above what is there.
SLACK = 15


def lines(folder: Path) -> int:
    """Lines of all modules below `folder`, tests and builds left out."""
    skipped = {"tests", "build", "__pycache__"}
    modules = (p for p in folder.rglob("*.py") if not skipped & set(p.relative_to(folder).parts))
    return sum(len(p.read_text(encoding="utf-8").splitlines()) for p in modules)


def measured(root: Path) -> dict[str, int]:
    """What there is in the repository at `root`, by the keys of `BUDGETS`."""
    core = root / "mtb_core"
    folders = [p for p in sorted(core.iterdir()) if p.is_dir()]
    found = {f"mtb_core/{p.name}": lines(p) for p in folders if p.name not in ("tests", "build", "__pycache__")}
    found = {name: count for name, count in found.items() if count}
    found["mtb_core/*.py"] = lines(core) - sum(found.values())
    found["mtb_core"] = lines(core)
    projects = [p.parent for pattern in ("*", "plugins/*") for p in root.glob(f"{pattern}/pyproject.toml")]
    found["all packages"] = sum(map(lines, projects))
    return found


def complaints(found: Mapping[str, int], budgets: Mapping[str, int]) -> list[str]:
    """A sentence for each budget that is exceeded, is far too high, is missing, or belongs to nothing."""
    said = []
    for name in sorted(found.keys() | budgets.keys()):
        count, budget = found.get(name), budgets.get(name)
        if budget is None:
            said.append(f"{name} has {count} lines and no budget; give it one, and the reason in {RECORD}.")
        elif count is None:
            said.append(f"{name} has a budget and is not there (any more); remove the budget.")
        elif count > budget:
            said.append(
                f"{name} has {count} lines, {count - budget} more than its budget of {budget}. Take as many out: a "
                f"budget may go down, but goes up only with a reason in {RECORD}."
            )
        elif 100 * budget > count * (100 + SLACK):
            said.append(
                f"{name} has {count} lines; its budget of {budget} is more than {SLACK}% above. Lower it to about "
                f"{count * 1.02:.0f}, so that what was gained is kept."
            )
    return said


def test_every_part_keeps_its_budget() -> None:
    """The budgets hold, for each folder of core, for core and for all packages, and none lies far above what is there."""
    said = complaints(measured(ROOT), BUDGETS)
    assert not said, "\n".join(said)


@pytest.mark.parametrize(
    ("found", "budgets", "said"),
    [
        ({"a": 100}, {"a": 100}, []),
        ({"a": 100}, {"a": 115}, []),
        ({"a": 100}, {"a": 116}, ["a has 100 lines; its budget of 116 is more than 15% above. Lower it to about 102"]),
        ({"a": 103, "b": 9}, {"a": 100, "b": 10}, ["a has 103 lines, 3 more than its budget of 100"]),
        ({"a": 100, "b": 10}, {"a": 100}, ["b has 10 lines and no budget"]),
        ({"a": 100}, {"a": 100, "b": 10}, ["b has a budget and is not there"]),
    ],
)
def test_complaints_name_folder_and_lines(found: dict[str, int], budgets: dict[str, int], said: list[str]) -> None:
    """What is wrong is said with the folder and by how many lines, and nothing else is said."""
    texts = complaints(found, budgets)
    assert len(texts) == len(said)
    assert all(text.startswith(start) for text, start in zip(texts, said, strict=True))
    assert all("0013-line-budgets.md" in text for text in texts if "more than its" in text or "no budget" in text)


def test_lines_are_counted(tmp_path: Path) -> None:
    """Modules of a folder and of folders in it count, also empty lines; tests, builds and other files do not."""
    files = {
        "mtb_core/pyproject.toml": 9,
        "mtb_core/run.py": 3,
        "mtb_core/api/values.py": 4,
        "mtb_core/api/deep/er.py": 5,
        "mtb_core/tests/test_x.py": 100,
        "mtb_core/build/lib/api.py": 100,
        "mtb_core/api/README.md": 100,
        "plugins/mtb_x/pyproject.toml": 9,
        "plugins/mtb_x/strategy.py": 7,
        "plugins/mtb_x/tests/test_x.py": 100,
        "benchmarks/speed.py": 100,
    }
    for name, count in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("\n" * count)
    assert measured(tmp_path) == {"mtb_core/*.py": 3, "mtb_core/api": 9, "mtb_core": 12, "all packages": 19}


def test_the_record_is_there() -> None:
    """The decision that messages point to exists."""
    assert (ROOT / RECORD).is_file()
