"""The recipes that come with this package, in the folder beside this file, each known by its name."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from mtb_core import ConfigError, nearest

FOLDER = Path(__file__).with_name("recipes")


def recipes() -> dict[str, Path]:
    """The sweep files of all recipes by name, sorted."""
    return {file.stem: file for file in sorted(FOLDER.glob("*.toml"))}


def abouts() -> Mapping[str, str]:
    """What each recipe is about, by name."""
    return {name: tomllib.loads(file.read_text(encoding="utf-8"))["about"] for name, file in recipes().items()}


def sweep_file(given: str) -> Path:
    """The file that is meant: `given` where that is one, else the recipe of that name.

    Raises:
        ConfigError: it is neither; the text names what is near, and all recipes.
    """
    file, known = Path(given), recipes()
    if file.is_file():
        return file
    if given in known:
        return known[given]
    if file.is_dir():
        raise ConfigError(f"{given} is a folder; give the sweep file itself.")
    if file.stem in known:
        hint = f" A recipe of that name comes with mtb: mtb sweep {file.stem}."
    else:
        hint = nearest(file.stem, known)
    raise ConfigError(
        f"There is no file {given}.{hint} Recipes: {', '.join(known)}; mtb sweep --list-recipes tells what each is for."
    )
