"""``manifest.json``, the list of everything in a checkpoint, and ``READY``, its commit mark."""

# ruff: noqa: TRY004  (a wrong type in a file is a wrong value)

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from . import files
from .layout import MANIFEST, READY, SMALL_FILE_BYTES, DamagedCheckpoint, dump_json, parse_json

#: Format that is written. Format 3 is the same but for ``storage``. See `mtb_core.ckpt.versions` for 1 and 2.
FORMAT_VERSION = 4
OLDEST_VERSION = 3

#: What a manifest says where a caller of `CheckpointManager.save` did not.
UNSAID: Mapping[str, Any] = {
    "samples_seen": 0,
    "tokens_seen": 0,
    "strategy": "unknown",
    "precision": "unknown",
    "config": {},
    "config_fingerprint": "unknown",
    "plugins": [],
    "storage_distribution": None,
}

#: Format of the tensors where the manifest names none, before version 4.
OLD_FORMAT, OLD_DISTRIBUTION = "dcp", "mtb-dcp"

#: Keys that every manifest has, with their types; whole numbers are counts, so not negative.
_REQUIRED: dict[str, tuple[type, ...]] = {
    "format_version": (int,),
    "step": (int,),
    "sequence": (int,),
    "samples_seen": (int,),
    "tokens_seen": (int,),
    "strategy": (str,),
    "world_size": (int,),
    "precision": (str,),
    "config": (dict,),
    "config_fingerprint": (str,),
    "plugins": (list,),
    "created_at": (str,),
    "deterministic": (bool,),
    "determinism_reason": (str, type(None)),
}
#: What manifests have besides since format 4: the checkpoint format of the tensors (see `mtb_core.ckpt.storage`), and
#: the distribution that it came with.
_SINCE_4: dict[str, tuple[type, ...]] = {"storage": (str,), "storage_distribution": (str, type(None))}
_COUNTS = ("global_step", "samples_seen", "tokens_seen")

#: No count is larger (the longest name of a step has 18 digits).
_MOST = 10**18 - 1


@attrs.frozen
class FileEntry:
    """Size in bytes and digest (hexadecimal) of one file."""

    size: int
    digest: str


@attrs.frozen
class Manifest:
    """A parsed ``manifest.json``. `values`: everything in it except the list of files."""

    values: Mapping[str, Any]
    files: Mapping[str, FileEntry]

    @property
    def step(self) -> int:
        """Global step after which it was taken."""
        return int(self.values["step"])

    @property
    def sequence(self) -> int:
        """Number of the publication in its folder, counted from 1: says which of two was published later."""
        return int(self.values["sequence"])

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote it."""
        return int(self.values["world_size"])

    @property
    def storage(self) -> tuple[str, str | None]:
        """The checkpoint format of its tensors, and the distribution that has it, as far as that is known."""
        if self.values["format_version"] < FORMAT_VERSION:
            return OLD_FORMAT, OLD_DISTRIBUTION
        return str(self.values["storage"]), self.values["storage_distribution"]

    def to_bytes(self) -> bytes:
        """Content of ``manifest.json``."""
        listed = {name: attrs.asdict(entry) for name, entry in self.files.items()}
        return dump_json({**self.values, "digest_algorithm": files.ALGORITHM, "files": listed})


@contextmanager
def reading(path: Path, name: str) -> Iterator[None]:
    """Around code that reads the file `name` of the checkpoint at `path`.

    Raises:
        DamagedCheckpoint: the file is missing or cannot be read, or the code raises ValueError: what is wrong with it.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise DamagedCheckpoint(path, name, "it is missing") from error
    except OSError as error:
        raise DamagedCheckpoint(path, name, error.strerror or str(error)) from error
    except ValueError as error:
        raise DamagedCheckpoint(path, name, str(error)) from error


def ready_text(digest: str) -> bytes:
    """Content of ``READY`` for a manifest with this digest."""
    return f"{MANIFEST} {files.ALGORITHM}:{digest}\n".encode()


def check_ready(path: Path) -> bytes:
    """The bytes of the manifest of the checkpoint at `path`, after comparing them with ``READY``.

    Raises:
        DamagedCheckpoint: either file is missing, unreadable, or they do not fit.
    """
    with reading(path, READY):
        ready = files.read_small(path, READY, 4096)
    if not ready.strip():
        raise DamagedCheckpoint(path, READY, "it is empty, so the save was never completed")
    with reading(path, MANIFEST):
        text = files.read_small(path, MANIFEST, SMALL_FILE_BYTES)
    if ready != ready_text(files.digest_bytes(text)):
        raise DamagedCheckpoint(
            path, MANIFEST, f"its digest is not the one that {READY} names; one of the two was changed"
        )
    return text


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`, checked against ``READY`` and for form.

    Raises:
        DamagedCheckpoint: see `check_ready`; or not a manifest of this format.
    """
    text = check_ready(path)
    with reading(path, MANIFEST):
        return _parse(parse_json(text))


def _parse(values: Any) -> Manifest:
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    version = values.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise ValueError(
            f"its format version {version} is newer than {FORMAT_VERSION}, the newest known here; update mtb-core"
        )
    check_values(values)
    if values["format_version"] < OLDEST_VERSION:
        raise ValueError(
            f"its format version is {version}; {OLDEST_VERSION} to {FORMAT_VERSION} are expected in {MANIFEST}"
        )
    if values.get("digest_algorithm") != files.ALGORITHM:
        raise ValueError(f"its digests are by {values.get('digest_algorithm')!r}; known here: {files.ALGORITHM}")
    listed = values.pop("files", None)
    if not isinstance(listed, dict):
        raise ValueError("the value of 'files' is missing or of the wrong type")
    if not 1 <= values["world_size"] <= len(listed):  # each rank has files; before any of their names is made
        raise ValueError(f"its world_size is {values['world_size']}, but it lists {len(listed)} files in all")
    return Manifest(values, {name: _entry(name, entry) for name, entry in listed.items()})


def check_values(values: Mapping[str, Any]) -> None:
    """Check that the values of a manifest are all there and of their types.

    Raises:
        ValueError: one is not; names its key.
    """
    required = {**_REQUIRED, **(_SINCE_4 if values.get("format_version") == FORMAT_VERSION else {})}
    for key, kinds in required.items():
        if type(values.get(key)) not in kinds or key not in values:
            raise ValueError(f"the value of {key!r} is missing or of the wrong type")
        if int in kinds:
            _check_count(key, values[key])
    if not all(isinstance(plugin, dict) for plugin in values["plugins"]):
        raise ValueError("the value of 'plugins' is not a list of objects")


def with_counts(sections: Mapping[str, Any], step: int, meta: Mapping[str, Any]) -> dict[str, Any]:
    """`sections` of a checkpoint of `step`, with the counts that its ``train_state`` lacks."""
    stated = sections.get("train_state")
    if stated is not None and not isinstance(stated, Mapping):
        return dict(sections)  # refused by `check_sections`
    counts = {"global_step": step, **{key: meta.get(key, UNSAID[key]) for key in ("samples_seen", "tokens_seen")}}
    return {**sections, "train_state": {**counts, **(stated or {})}}


def check_sections(sections: Mapping[str, Any], step: int) -> None:
    """Check what a reader relies on in the ``state.json`` of a checkpoint of `step`.

    Raises:
        ValueError: ``train_state`` is missing, a count in it is none, or is of another step; or another section is of
            the wrong type.
    """
    state = sections.get("train_state")
    if not isinstance(state, Mapping):
        raise ValueError("the value of 'train_state' is missing or not an object")
    for key in _COUNTS:
        if type(state.get(key)) is not int:
            raise ValueError(f"the value of {key!r} in 'train_state' is missing or no whole number")
        _check_count(key, state[key])
    if state["global_step"] != step:
        raise ValueError(f"its 'train_state' is of step {state['global_step']}, but the checkpoint is of step {step}")
    for key in ("scheduler", "data", "plugins", "scalars"):
        if not isinstance(sections.get(key), Mapping | None):
            raise ValueError(f"the value of {key!r} is not an object")


def _check_count(key: str, value: int) -> None:
    if not 0 <= value <= _MOST:
        raise ValueError(f"the value of {key!r} is {'negative' if value < 0 else 'too large'}")


def _entry(name: str, entry: Any) -> FileEntry:
    files.safe_parts(name)
    if not isinstance(entry, dict):
        raise ValueError(f"the entry of {name!r} is not an object")
    size, digest = entry.get("size"), entry.get("digest")
    if type(size) is not int or size < 0:
        raise ValueError(f"the size of {name!r} is missing or not a number of bytes")
    if not isinstance(digest, str) or len(digest) != 32 or set(digest) - set("0123456789abcdef"):
        raise ValueError(f"the digest of {name!r} is missing or not {files.ALGORITHM}")
    return FileEntry(size, digest)
