"""What is at a path."""

import pytest

from mtb_core import ConfigError
from mtb_data.info import describe_path
from mtb_data.prepare import prepare


def test_describe(tmp_path):
    """A token file is described by its header, size and whether its digest holds; texts by what they would be."""
    text = tmp_path / "one.txt"
    text.write_bytes(b"0123456789")
    prepare([text], tmp_path / "out")
    file = tmp_path / "out" / "tokens.mtb"
    values = describe_path(tmp_path / "out")

    assert (values["kind"], values["tokens"], values["digest_ok"]) == ("token_file", 10, True)
    assert values["size_bytes"] == 4096 + 10
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert describe_path(file)["digest_ok"] is False
    assert (describe_path(text)["kind"], describe_path(text)["tokens"]) == ("text_file", 10)
    with pytest.raises(ConfigError, match=r"There is no file or folder .*gone"):
        describe_path(tmp_path / "gone")
