"""What can be said about a result: statements that follow from its record by rules."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from mtb_report.results import Record

Part = Literal["meaning", "unusual", "next"]


@attrs.frozen
class Finding:
    """One statement, complete sentences, and the part of the page it belongs to.

    Attributes:
        rule: the name of the rule it follows from, for tests and for the documentation.
        performance: it rests on times, rates or memory, and is not made of a result whose measurement is not valid.
    """

    part: Part
    rule: str
    text: str
    performance: bool = False


@attrs.frozen
class Explanation:
    """All statements about one result, in the order in which they are read."""

    title: str
    findings: tuple[Finding, ...]

    def part(self, name: Part) -> list[Finding]:
        """The statements of one part."""
        return [finding for finding in self.findings if finding.part == name]


def known(record: Record, name: str) -> float | None:
    """A number of the record, None where there is none."""
    value = record.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def text_of(record: Record, name: str) -> str | None:
    """A text of the record, None where there is none."""
    value: Any = record.get(name)
    return value if isinstance(value, str) and value else None
