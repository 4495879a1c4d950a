"""Options of strategies and sinks: what is taken, and what is refused."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from mtb_core import ConfigError, option, parse_options


@attrs.frozen
class Options:
    """With an optional of either kind."""

    size: int = option(1, help="A size.", minimum=0)
    share: float = option(0.5, help="A share.")
    limit: int | None = option(3, help="A limit.")
    place: str | None = option(None, help="A place.", choices=("none", "cpu"))


def test_none_is_a_choice_where_it_is_listed() -> None:
    """`none` means None, but not where it is one of the choices: then it can be told from not saying anything."""
    found = parse_options(Options, {"limit": "none", "place": "none"}, owner="strategy 'x'")
    assert (found.limit, found.place) == (None, "none")


@pytest.mark.parametrize(
    ("name", "value"),
    [("size", float("inf")), ("size", float("nan")), ("size", 1.5), ("share", "inf"), ("share", 10**400)],
    ids=str,
)
def test_what_is_no_number_is_refused(name: str, value: Any) -> None:
    """Also what a TOML or JSON reader lets through."""
    with pytest.raises(ConfigError, match=rf"'{name}' of strategy 'x' is .*must be a"):
        parse_options(Options, {name: value}, owner="strategy 'x'")
