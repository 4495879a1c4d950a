"""From what --data says to a data set."""

import os

import numpy as np
import pytest

from mtb_core import ConfigError, DatasetInfo, TrainConfig
from mtb_core.data.prepare import prepare
from mtb_core.data.source import describe_path, open_dataset
from mtb_core.data.synthetic import SyntheticDataset

NAMED = {"synthetic": DatasetInfo("synthetic", "Random.", impl="mtb_core.data.synthetic:synthetic")}


def opened(path, which="data", **settings):
    return open_dataset(TrainConfig(**{which: str(path), "seq_length": 4, **settings}), which, named=NAMED)


def first(data):
    return bytes(data.fetch(np.array([0]))[0][0].tolist())


def test_named():
    """A name is the plugin's data set."""
    assert isinstance(opened("synthetic"), SyntheticDataset)


def test_paths(tmp_path):
    """A text file, a folder of texts, a token file and its folder are data sets with the same samples."""
    text = tmp_path / "texts" / "one.txt"
    text.parent.mkdir()
    text.write_bytes(b"0123456789")
    prepare([text], tmp_path / "out")

    for path in (text, text.parent, tmp_path / "out", tmp_path / "out" / "tokens.mtb"):
        data = opened(path)
        assert (data.size, data.vocab_size, data.seq_length) == (3, 256, 4)
        assert first(data) == b"0123"
    assert first(opened(text, "eval_data")) == b"0123"


def test_typo(tmp_path):
    """What is neither a name nor a path is refused, with the nearest of both and what is valid."""
    (tmp_path / "corpus.txt").touch()

    with pytest.raises(ConfigError, match=r"--data is 'sinthetic', .*Did you mean 'synthetic'\? Valid: synthetic, or"):
        opened("sinthetic")
    with pytest.raises(ConfigError, match=r"--eval-data is .*corpsu\.txt.*Did you mean 'corpus\.txt'\?"):
        opened(tmp_path / "corpsu.txt", "eval_data")


def test_too_little(tmp_path):
    """A file with less than two tokens is refused by name."""
    (tmp_path / "tiny").write_text("x")
    with pytest.raises(ConfigError, match=r"The text file .*tiny holds 1 token;"):
        opened(tmp_path / "tiny")


def test_not_a_file(tmp_path):
    """A pipe is refused, not waited for."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"pipe is neither a file nor a folder"):
        opened(tmp_path / "pipe")


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
