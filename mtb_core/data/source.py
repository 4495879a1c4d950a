"""From what ``--data`` says to a data set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mtb_core.api.descriptions import DatasetInfo, construct
from mtb_core.api.errors import ConfigError
from mtb_core.api.options import nearest, parse_options
from mtb_core.config import TrainConfig, option_name

from .dataset import Dataset
from .text import BYTE_VOCAB_SIZE, map_text_file, read_text_folder
from .tokenfile import find_token_file, open_token_file
from .tokens import TokenDataset


def open_dataset(config: TrainConfig, which: str = "data", *, named: Mapping[str, DatasetInfo]) -> Dataset:
    """The data set that the setting `which` (``"data"`` or ``"eval_data"``) names.

    A name from `named` is that data set; everything else is a path: a prepared token file or its folder, a text file,
    or a folder with text files.

    Raises:
        ConfigError: there is no such name or path, or what is there can't be used.
    """
    value: str = getattr(config, which)
    if value in named:
        info = named[value]
        options = parse_options(info.options, config.data_opt, owner=f"data set '{value}'")
        dataset: Dataset = construct(info, options, config)
        return dataset
    if config.data_opt and which == "data":
        raise ConfigError(f"--data-opt belongs to a named data set, but --data {value!r} is not one; leave it out.")
    path = Path(value)
    if not path.exists():
        raise _unknown(value, which, named)
    if file := find_token_file(path):
        header, tokens = open_token_file(file)
        return TokenDataset(tokens, header.vocab_size, config.seq_length, origin=f"The token file {file}")
    if path.is_dir():
        content, _ = read_text_folder(path)
        return TokenDataset(content, BYTE_VOCAB_SIZE, config.seq_length, origin=f"The folder {path}")
    return TokenDataset(map_text_file(path), BYTE_VOCAB_SIZE, config.seq_length, origin=f"The text file {path}")


def _unknown(value: str, which: str, named: Mapping[str, DatasetInfo]) -> ConfigError:
    path = Path(value)
    hint = nearest(value, named)
    if not hint and path.parent.is_dir():
        hint = nearest(path.name, [sibling.name for sibling in path.parent.iterdir()])
    names = ", ".join(sorted(named))
    return ConfigError(
        f"{option_name(which)} is {value!r}, which is neither a data set's name nor an existing path.{hint} Valid: "
        f"{names}, or the path of a prepared token file, a text file, or a folder of text files; "
        "`mtb data prepare` makes token files."
    )
