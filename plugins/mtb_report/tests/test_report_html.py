"""The HTML page: one file that loads nothing, escapes everything, and works in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from mtb_report.report.blocks import Cell, Column, Fact, Listing, Plot, Report, Section, Series, Table, Text
from mtb_report.report.build import build
from mtb_report.report.html import html
from mtb_report.report.plots import svg
from mtb_report.results import find_records

SAMPLES = Path(__file__).parent / "test_report_samples"
BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: apt-get install chromium)")
EVIL = '</script><img src=x onerror="alert(1)">&\'$\\frac{a}{b}$ {{ 1 }}'


@pytest.fixture(scope="module")
def page() -> str:
    return html(build(find_records([SAMPLES]), "Samples"))


class Reader(HTMLParser):
    """Tags with their attributes, and what is never closed."""

    VOID = {"meta", "link", "img", "br"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_loads_nothing(page: str) -> None:
    """Every tag is closed, no attribute leads outside, identifiers are unique and those referred to exist."""
    reader = Reader(page)
    assert reader.open == []
    for tag, attributes in reader.tags:
        for name in ("src", "href", "xlink:href", "action", "data", "srcset"):
            value = attributes.get(name) or ""
            assert value.startswith("#") or value in ("", "data:,"), (tag, name, value)
    assert not re.search(r"@import|url\((?!#)", page)
    ids = [attributes["id"] for _, attributes in reader.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    for _, attributes in reader.tags:
        for name in ("aria-labelledby", "aria-describedby"):
            assert attributes.get(name) in (None, *ids)
        target = attributes.get("href") or attributes.get("xlink:href") or ""
        assert not target.startswith("#") or target[1:] in ids
    for reference in re.findall(r"url\(#([^)]+)\)", page):
        assert reference in ids


def test_tables_are_accessible(page: str) -> None:
    """Each table has a caption, heads with a scope, a row head in each row, and can be scrolled from the keyboard."""
    tables = re.findall(r"<div class=\"scroll\"(.*?)</div>", page, re.DOTALL)
    assert len(tables) > 20
    for table in tables:
        assert 'tabindex="0" role="region" aria-labelledby=' in table
        assert table.count("<caption") == 1
        head, body = table.split("<tbody>")
        assert head.count("<th ") == head.count('<th scope="col" aria-sort="none"') > 0
        assert body.count("<tr>") == body.count('<th scope="row"') > 0
    assert '<html lang="en">' in page


def test_the_same_results_make_the_same_page(page: str) -> None:
    """There is no date, no counter and no random identifier in it."""
    assert html(build(find_records([SAMPLES]), "Samples")) == page


def evil_report() -> Report:
    table = Table(
        EVIL, [Column(EVIL), Column(EVIL, numeric=True)], [[Cell(EVIL, EVIL), Cell(EVIL, 1.0, code=True)]], [EVIL]
    )
    plots = [
        Plot(EVIL, EVIL, "lines", EVIL, EVIL, [Series(EVIL, [1, 2], [1, 2])], reference=(1.0, EVIL)),
        Plot(EVIL, EVIL, "points", EVIL, EVIL, [Series(EVIL, [1, 2], [1, 2], labels=[EVIL, EVIL])]),
        Plot(EVIL, EVIL, "bars", EVIL, EVIL, [Series(EVIL, (), [1.0])], labels=[EVIL]),
    ]
    return Report(EVIL, [Fact(EVIL, EVIL)], [Section("evil", EVIL, [Text(EVIL), Listing([EVIL]), table, *plots])])


def test_everything_is_escaped() -> None:
    """Text from outside is shown as it is in every place, plots included, and is nowhere markup, mathematics or template."""
    text = html(evil_report())
    reader = Reader(text)
    assert [tag for tag, _ in reader.tags].count("script") == 1
    assert not [tag for tag, _ in reader.tags if tag == "img"]
    assert not [name for _, attributes in reader.tags for name in attributes if name.startswith("on")]
    assert EVIL in {attributes.get("data-sort") for _, attributes in reader.tags}
    shown = unescape(text)
    assert shown.count(f"<p>{EVIL}</p>") == shown.count(f"<li>{EVIL}</li>") - 1 == 1
    for plot in [block for block in evil_report().sections[0].blocks if isinstance(block, Plot)]:
        drawing = svg(plot, "p")
        assert "<!--" not in drawing  # what matplotlib writes beside mathematics
        assert unescape(drawing).count(EVIL) == {"lines": 3, "points": 4, "bars": 3}[plot.kind]


def test_no_control_character_is_in_the_page() -> None:
    """Not in attributes either: one of them turns the writing round for what follows."""
    bad = "a\x00b\x1b[31m\u202ec"
    table = Table(bad, [Column(bad)], [[Cell(bad, bad)]])
    plot = Plot(bad, bad, "bars", "x", "", [Series(bad, (), [1.0])], labels=[bad])
    text = html(Report(bad, [], [Section("s", "s", [table, plot])]))
    assert not set(text) & set("\x00\x1b\u202e")


def test_a_long_name_leaves_room_for_the_drawing(recwarn: pytest.WarningsRecorder) -> None:
    """Both ends of it are written; a character that the drawing's own font lacks is no matter of the user's."""
    bars = svg(Plot("t", "", "bars", "x", "", [Series("a", (), [1.0, 1.0])], labels=["b" * 5000 + "e", "\ufdfa"]), "p")
    assert f"{'b' * 32}…{'b' * 30}e<" in bars
    points = svg(Plot("t", "", "points", "x", "y", [Series("a", [1.0], [1.0], labels=["b" * 5000])]), "p")
    assert "b" * 33 not in points
    assert not recwarn.list


def test_series_of_a_plot_can_be_found() -> None:
    """All artists of a series carry its number, error bars and labels too, and colours are the page's."""
    series = [Series("a", [1, 2], [3, 4], [2.5, 3.5], [3.5, 4.5]), Series("b", [1, 2], [5, 6])]
    drawing = svg(Plot("t", "", "lines", "x", "y", series), "p")
    assert (drawing.count('data-series="0"'), drawing.count('data-series="1"')) == (2, 1)
    assert "var(--series-0)" in drawing
    assert not re.search(r"#[0-9a-f]{6}", drawing)
    bars = svg(Plot("t", "", "bars", "x", "", [Series("a", (), [1, 2])], labels=["one", "two"]), "q")
    assert bars.count('data-series="0"') == 2
    points = svg(Plot("t", "", "points", "x", "y", [Series("a", [1, 9], [1, 9], labels=["m", "n"])]), "q")
    assert points.count('data-series="0"') == 3


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0, 0.0, 1e300])
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_any_number_can_be_drawn(value: float, scale: Any) -> None:
    """A number without a place on its axis is a gap, alone or among others, and no error or warning."""
    for values in ([value], [1.0, value, 2.0]):
        ranks = [float(n) for n in range(1, len(values) + 1)]
        lines = [Series("a", ranks, values, values, values), Series("b", values, ranks)]
        for plot in (
            Plot("t", "", "lines", "x", "y", lines, x_scale=scale, y_scale=scale, y_from_zero=scale == "linear"),
            Plot("t", "", "lines", "x", "y", lines, x_scale="ranks", y_scale=scale),
            Plot("t", "", "points", "x", "y", [Series("a", ranks, values, labels=["l"] * len(values))]),
            Plot("t", "", "bars", "x", "y", [Series("a", (), values)], labels=["l"] * len(values)),
        ):
            assert svg(plot, "p").endswith("</svg>\n")


def test_points_on_one_another_have_one_label() -> None:
    """Labels do not cover each other."""
    plot = Plot("t", "", "points", "x", "y", [Series("a", [1, 1.001, 9], [1, 1, 9], labels=["m", "n", "o"])])
    assert [label in svg(plot, "p") for label in (">m<", ">n<", ">o<")] == [True, False, True]


def colors(css: str) -> dict[str, str]:
    return dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", css))


def contrast(a: str, b: str) -> float:
    """The contrast ratio of WCAG 2.2, section 1.4.3."""

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(scheme: str) -> None:
    """Text has at least 4.5:1 on every ground it stands on, lines of plots 3:1, in light and dark."""
    css = (resources.files("mtb_report.report") / "templates" / "report.css").read_text(encoding="utf-8")
    light, dark = css.split("@media (prefers-color-scheme: dark)", 1)
    known = colors(light if scheme == "light" else dark)
    for ground in ("page", "panel", "stripe"):
        for ink in ("ink", "muted", "accent", "good", "bad", "warn"):
            assert contrast(known[ink], known[ground]) >= 4.5, (ink, ground)
    for number in range(8):
        assert contrast(known[f"series-{number}"], known["panel"]) >= 3, number


#: Watches for anything that goes wrong or out, from before the page's own content on.
PROBE = """<script>
window.probe = { errors: [] };
addEventListener("error", (e) => probe.errors.push(String(e.message)), true);
addEventListener("securitypolicyviolation", (e) => probe.errors.push(`policy: ${e.blockedURI}`));
for (const kind of ["error", "warn", "log"]) console[kind] = (...said) => probe.errors.push(said.join(" "));
</script>"""

#: Uses the page as a reader does, and writes what it saw into the document.
DRIVER = """<script>
addEventListener("load", () => {
  const table = [...document.querySelectorAll("table")].find((t) => t.caption.textContent === "Throughput and scaling");
  const names = () => [...table.tBodies[0].rows].map((row) => row.cells[0].textContent);
  const head = (title) => [...table.querySelectorAll("th button")].find((b) => b.textContent === title);
  probe.start = names();
  for (const [title, key] of [["Tokens/s", "rate"], ["Run", "run"]]) {
    head(title).click(); probe[`${key}Up`] = names(); probe[`${key}Sort`] = head(title).closest("th").ariaSort;
    head(title).click(); probe[`${key}Down`] = names();
  }
  probe.marked = table.querySelectorAll('[aria-sort]:not([aria-sort="none"])').length;
  const figure = document.querySelector("figure");
  const shown = (n) => [...figure.querySelectorAll(`[data-series="${n}"]`)].map((part) => getComputedStyle(part).display !== "none");
  const button = figure.querySelector(".legend button");
  probe.before = [shown(0), shown(1)];
  button.click(); probe.hidden = [shown(0), shown(1), button.ariaPressed];
  button.click(); probe.again = [shown(0), shown(1), button.ariaPressed];
  probe.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  probe.outside = [...document.querySelectorAll("h1, h2, p, figure, .scroll, .facts")]
    .filter((part) => part.getBoundingClientRect().right > innerWidth + 0.5).length;
  probe.ground = getComputedStyle(document.body).backgroundColor;
  probe.line = getComputedStyle(document.querySelector('svg [data-series="0"] path')).stroke;
  probe.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
  probe.menu = document.querySelector("nav details").open;
  parent.postMessage(JSON.stringify(probe), "*");
});
</script>"""

FRAME = """<!DOCTYPE html><meta charset="utf-8"><body style="margin:0"><pre id="seen"></pre>
<script>addEventListener("message", (e) => {{ document.getElementById("seen").textContent = e.data; }});</script>
<iframe src="page.html" style="border:0;width:{width}px;height:800px"></iframe>"""


@pytest.fixture(scope="module")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Open a page in Chromium, in a frame of some width, and give what the probe saw."""

    def browse(page: str, width: int, *, dark: bool = False) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("browser")
        head, body = page.split("<title>", 1)
        (folder / "page.html").write_text(f"{head}{PROBE}<title>{body.replace('</body>', DRIVER + '</body>')}")
        (folder / "frame.html").write_text(FRAME.format(width=width))
        done = subprocess.run(
            [
                str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr",
                f"--user-data-dir={folder / 'profile'}", "--window-size=1500,1000", "--virtual-time-budget=20000",
                f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                "--dump-dom", f"file://{folder / 'frame.html'}",
            ],
            capture_output=True, text=True, timeout=240, check=True,
        )  # fmt: skip
        seen = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
        assert seen is not None
        assert seen[1], done.stderr[-2000:]
        found: dict[str, Any] = json.loads(seen[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
        found["console"] = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        return found

    return browse


@needs_browser
def test_in_a_browser(page: str, browse: Callable[..., dict[str, Any]]) -> None:
    """No error, no request; columns sort with the unknown behind; series are hidden and come back."""
    seen = browse(page, 1300)
    assert seen["errors"] == seen["console"] == seen["requests"] == []
    up, down = seen["rateUp"], seen["rateDown"]
    unknown = ["ddp ×2 · busy-w2", "ddp ×2 · crash-w2"]
    assert sorted(up) == sorted(down) == sorted(seen["start"])
    assert up[-2:] == down[-2:] == unknown
    assert up[:3] == ["single ×1", "fsdp ×2 · fsdp-w2", "ddp ×2 · nan-w2"]
    assert up[4] == "deepspeed stage 3 ×2"  # 9,000 is between 1,600 and 40,500 as a number, not as a text
    assert down[:-2] == up[:-2][::-1]
    assert seen["rateSort"] == "ascending"
    assert seen["runUp"] == seen["runDown"][::-1]
    assert seen["runUp"] != seen["start"]
    assert seen["marked"] == 1
    first, second = seen["before"]
    assert set(first) == set(second) == {True}
    assert seen["hidden"] == [[False] * len(first), second, "false"]
    assert seen["again"] == [first, second, "true"]
    assert seen["menu"] is True


@needs_browser
def test_on_a_phone_in_the_dark(page: str, browse: Callable[..., dict[str, Any]]) -> None:
    """Nothing sticks out at 390 pixels, the menu is folded, and dark colours reach the plots."""
    seen = browse(page, 390, dark=True)
    assert seen["errors"] == seen["console"] == []
    assert seen["overflow"] == 0
    assert seen["outside"] == 0
    assert seen["menu"] is False
    assert seen["ground"] == "rgb(20, 22, 26)"
    assert seen["line"] == "rgb(116, 170, 240)"


@needs_browser
def test_hostile_text_does_nothing_in_a_browser(browse: Callable[..., dict[str, Any]]) -> None:
    """No script of a result runs, and nothing is asked for on its behalf."""
    made = evil_report()
    training = next(s for s in build(find_records([SAMPLES / "newer"]), "x").sections if s.name == "training")
    seen = browse(html(Report(made.title, made.facts, [training, *made.sections])), 900)
    assert seen["errors"] == seen["console"] == seen["requests"] == []
