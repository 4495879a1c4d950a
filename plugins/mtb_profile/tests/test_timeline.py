"""The drawing of one step's collectives."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from mtb_core import ConfigError
from mtb_profile.analysis import analyze
from mtb_profile.timeline import as_svg, as_text, find_timeline


@pytest.fixture
def analysis(tracing, tmp_path):
    """Two ranks; in step 1, rank 1 comes 40 µs late to the all-reduce."""
    paths = []
    for rank in (0, 1):
        t, at = tracing.Trace(rank), 0.0
        for number in range(2):
            sleep = 40.0 * number
            at = tracing.host_step(t, number, at, sleep=sleep * rank, late=sleep * (1 - rank))
        paths.append(t.write(tmp_path / f"rank_{rank}.json"))
    return analyze(paths)


def test_text(analysis):
    """A row for each rank: points where it waits, letters where bytes move; both end together."""
    _, first, second, legend = as_text(find_timeline(analysis, 1), width=70).splitlines()
    assert first == "rank 0 |" + " " * 40 + "." * 20 + "R" * 6 + "    |"
    assert second == "rank 1 |" + " " * 60 + "R" * 6 + "    |"
    assert "R all_reduce" in legend


def test_svg(analysis):
    """The picture is XML with a bar, and what it is in words, for each collective; it refers to nothing outside."""
    text = as_svg(find_timeline(analysis, 1))
    root = ET.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    titles = [t.text for g in root.iter(f"{space}g") for t in g.iter(f"{space}title")]
    assert titles == [
        "all_reduce, 4000 bytes: 0.050 ms, 0.040 ms of it waiting",
        "all_reduce, 4000 bytes: 0.010 ms, 0.000 ms of it waiting",
    ]
    assert "href" not in text
    assert "url(" not in text


def test_which_step(analysis):
    """The middle step by default; one that is not there is refused with those that are."""
    assert find_timeline(analysis).step == 1
    with pytest.raises(ConfigError, match=r"--step is 7; valid are the steps of the traces: \[0, 1\]"):
        find_timeline(analysis, 7)


def test_nothing_to_draw(tracing, tmp_path):
    """Without collectives, the text says so and the picture is still one."""
    found = analyze([tracing.Trace().step(0, 0, 5).op("aten::mm", 0, 5).write(tmp_path / "t.json")])
    timeline = find_timeline(found)
    assert "rank 0 |" in as_text(timeline)
    assert ET.fromstring(as_svg(timeline)).tag.endswith("svg")
    whole = find_timeline(analyze([tracing.Trace().op("aten::mm", 0, 5).write(tmp_path / "u.json")]))
    assert as_text(whole) == "Collectives of the whole trace: there are none."
