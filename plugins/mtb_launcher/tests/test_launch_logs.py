from mtb_launcher.logs import Tail


def test_whole_lines_only(tmp_path):
    """A line is handed out once it is whole; at the end the rest is too."""
    path = tmp_path / "log"
    tail = Tail(path)
    assert list(tail.lines()) == []
    path.write_bytes(b"one\ntw")
    assert list(tail.lines()) == ["one"]
    with path.open("ab") as file:
        file.write(b"o\nthree")
    assert list(tail.lines()) == ["two"]
    assert list(tail.lines(end=True)) == ["three"]
    assert list(tail.lines(end=True)) == []


def test_begins_at_the_end(tmp_path):
    """What was there before is not handed out again (a restart appends to the same log)."""
    path = tmp_path / "log"
    path.write_bytes(b"old\n")
    tail = Tail(path)
    with path.open("ab") as file:
        file.write(b"new\n")
    assert list(tail.lines()) == ["new"]


def test_text_is_made_showable(tmp_path):
    """Bytes that are no UTF-8 do not fail; of a line rewritten with carriage returns the last state is shown."""
    path = tmp_path / "log"
    tail = Tail(path)
    path.write_bytes(b"\xff\n 10%\r 50%\r100%\nend\r\n")
    assert list(tail.lines()) == ["\ufffd", "100%", "end"]


def test_endless_line_comes_in_parts(tmp_path):
    """A line without end is handed out in parts instead of being kept."""
    path = tmp_path / "log"
    tail = Tail(path)
    path.write_bytes(b"x" * 600_000)
    parts = list(tail.lines(end=True))
    assert len(parts) > 1
    assert "".join(parts) == "x" * 600_000
