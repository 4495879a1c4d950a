"""From what --data says to a data set."""

import os

import numpy as np
import pytest

from mtb_core import ConfigError, DatasetInfo, TrainConfig
from mtb_core.data.source import open_dataset
from mtb_core.data.synthetic import SyntheticDataset
from mtb_core.data.tokenfile import Header

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
    header = Header("uint8", 256, tokens=10, documents=1, separator=0, tokenizer="bytes", digest="xxh3_128:00")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokens.mtb").write_bytes(header.encode() + text.read_bytes())

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
