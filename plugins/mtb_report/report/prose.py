"""An explanation as a page of text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from .blocks import printable
from .findings import Explanation, Finding, Part

_PARTS: tuple[tuple[Part, str, str], ...] = (
    ("meaning", "What it says", "The file holds no figure that these rules know; `mtb report` shows what there is."),
    ("unusual", "What is unusual", "Nothing stands out."),
    ("next", "What to measure next", "Nothing follows from this result alone."),
)


def page(explanation: Explanation, width: int) -> str:
    """The page, in lines of at most `width` characters where words allow it."""
    title = printable(explanation.title)
    lines = [title, "=" * len(title), ""]
    for name, heading, nothing in _PARTS:
        lines += [heading, "-" * len(heading)]
        lines += [*_paragraphs(explanation.part(name), nothing, width), ""]
    return "\n".join(lines).rstrip() + "\n"


def _paragraphs(findings: Sequence[Finding], nothing: str, width: int) -> list[str]:
    texts = list(dict.fromkeys(printable(finding.text) for finding in findings)) or [nothing]
    if findings and findings[0].part == "meaning":
        return textwrap.wrap(" ".join(texts), width)
    if not findings:
        return [nothing]
    return [line for text in texts for line in textwrap.wrap(text, width, initial_indent="- ", subsequent_indent="  ")]
