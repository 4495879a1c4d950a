"""Reading trace files piece by piece: Chrome's JSON format as PyTorch writes it, plain or gzip.

The events of a trace stand in one JSON array that may be gigabytes long. It is read in chunks. A chunk is cut between
two events; where that is, is not obvious, because ``},{`` may also stand inside an event or a text. The rule used
here cannot go wrong: a cut is right exactly if what stands before it, closed by a bracket, is valid JSON.

Times are decoded as decimals: ``1682725898236567.123`` µs has more digits than a double holds.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, cast

import attrs
import msgspec

from mtb_core import ConfigError

CHUNK_BYTES = 4 << 20
#: An event larger than this is taken for damage.
_EVENT_LIMIT_BYTES = 256 << 20
#: Keys before the events are few; their values too.
_HEAD_LIMIT_BYTES = 64 << 20
_CUTS_TRIED = 32

_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_SPACE = b" \t\r\n"
_JSON = json.JSONDecoder()


class Args(msgspec.Struct, gc=False):
    """Those arguments of an event that are used; any JSON value each."""

    correlation: Any = None
    external_id: Any = msgspec.field(default=None, name="External id")
    collective: Any = msgspec.field(default=None, name="Collective name")
    in_elements: Any = msgspec.field(default=None, name="In msg nelems")
    out_elements: Any = msgspec.field(default=None, name="Out msg nelems")
    group_size: Any = msgspec.field(default=None, name="Group size")
    dtype: Any = None
    group_name: Any = msgspec.field(default=None, name="Process Group Name")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    input_dims: Any = msgspec.field(default=None, name="Input Dims")
    input_type: Any = msgspec.field(default=None, name="Input type")
    device: Any = None
    thread_name: Any = msgspec.field(default=None, name="name")


class Event(msgspec.Struct, gc=False):
    """One event; `ts` and `dur` in µs."""

    ph: Any = None
    name: Any = None
    cat: Any = None
    pid: Any = None
    tid: Any = None
    ts: Decimal | None = None
    dur: Decimal | None = None
    args: Args | None = None


@attrs.define
class TraceFile:
    """A trace while it is read.

    Attributes:
        head: what the file says beside its events; complete once all events were read.
        decoder: of a list of events; by default of `Event`.
    """

    path: Path
    head: dict[str, Any] = attrs.field(factory=dict)
    decoder: msgspec.json.Decoder[list[Any]] = attrs.field(factory=lambda: msgspec.json.Decoder(list[Event]))

    def batches(self) -> Iterator[list[Any]]:
        """The events, some thousands at a time; at most a chunk of the file is held.

        Raises:
            ConfigError: the file cannot be read, or is no trace; the message says where it is damaged.
        """
        try:
            with _opened(self.path) as file:
                yield from self._read(file)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(
                f"The trace {self.path} cannot be read: {error}. A file that is cut off was perhaps copied while it was "
                "still being written; write it again."
            ) from error
        except RecursionError as error:
            raise self.damaged("its values are nested too deeply") from error

    def _read(self, file: IO[bytes]) -> Iterator[list[Any]]:
        buffer = self._find_events(file)
        read = len(buffer)
        ended = False
        wanted = CHUNK_BYTES
        while not ended:
            more = file.read(max(wanted - len(buffer), CHUNK_BYTES))
            read += len(more)
            buffer += more
            ended = not more
            if ended:
                break
            found = self._front(buffer, read)
            if found is None:
                wanted = 2 * len(buffer)
                if wanted > _EVENT_LIMIT_BYTES:
                    raise self.damaged(f"no event ends in the {len(buffer)} bytes before byte {read}")
                continue
            events, buffer = found
            wanted = CHUNK_BYTES
            yield events
        front = self._front(buffer, read)
        if front is not None:  # what is left for the slower parser is the last event and what follows
            events, buffer = front
            yield events
        yield self._last(buffer, read)

    def _find_events(self, file: IO[bytes]) -> bytes:
        """Read up to the array of events; returns what was read of it."""
        buffer = file.read(CHUNK_BYTES)
        if buffer.lstrip(_SPACE).startswith(b"["):
            return buffer.lstrip(_SPACE)[1:]
        while True:
            for match in _EVENTS_KEY.finditer(buffer):
                head = _object(buffer[: match.start()] + b'"traceEvents":0}')
                if head is not None:  # otherwise the words stood inside another value
                    head.pop("traceEvents", None)
                    self.head = head
                    return buffer[match.end() :]
            more = file.read(CHUNK_BYTES)
            if not more or len(buffer) > _HEAD_LIMIT_BYTES:
                raise ConfigError(
                    f'{self.path} is no trace: it has no list "traceEvents". Valid: Chrome\'s JSON trace format, as '
                    "torch.profiler's export_chrome_trace writes it, plain or gzip."
                )
            buffer += more

    def _front(self, buffer: bytes, read: int) -> tuple[list[Any], bytes] | None:
        try:
            return _decode_front(buffer, self.decoder)
        except msgspec.ValidationError as error:
            raise self.damaged(f"{error}, in what ends before byte {read}") from error

    def _last(self, buffer: bytes, read: int) -> list[Any]:
        """The events at the end, and the keys behind them."""
        text = "[" + buffer.decode("utf-8", errors="surrogateescape")
        try:
            _, end = _JSON.raw_decode(text)
            tail = text[end:].strip()
            rest = _object(f'{{"traceEvents":0{tail}'.encode()) if tail else {}
        except ValueError:
            # A bare array may lack its end: the program that wrote it was perhaps killed.
            text, end, rest = text.rstrip().rstrip(",") + "]", len(text) + 1, {}
        try:
            events = self.decoder.decode(text[:end].encode("utf-8", errors="surrogateescape"))
        except msgspec.DecodeError as error:
            raise self.damaged(f"{error}, in what begins at byte {read - len(buffer)}") from error
        if rest is None:
            raise self.damaged("what stands behind its events is no JSON")
        rest.pop("traceEvents", None)
        self.head.update(rest)
        return events

    def damaged(self, what: str) -> ConfigError:
        """The error that says that the file is damaged, and by `what`."""
        return ConfigError(
            f"The trace {self.path} is damaged: {what}. Valid: complete JSON in Chrome's trace format; write or copy the "
            "file again."
        )


def _decode_front(buffer: bytes, decoder: msgspec.json.Decoder[list[Any]]) -> tuple[list[Any], bytes] | None:
    """The whole events at the beginning of `buffer`, and the rest; None if there is no place to cut.

    Raises:
        msgspec.ValidationError: something in the array is no event.
    """
    brace = len(buffer)
    tried = 0
    while tried < _CUTS_TRIED:
        brace = buffer.rfind(b"{", 0, brace)
        if brace < 0:
            return None
        comma = _back_over_space(buffer, brace)
        if buffer[comma : comma + 1] != b"," or buffer[(stop := _back_over_space(buffer, comma)) : stop + 1] != b"}":
            continue
        tried += 1
        try:
            return decoder.decode(b"[" + buffer[: stop + 1] + b"]"), buffer[brace:]
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            continue
    return None


def _back_over_space(buffer: bytes, position: int) -> int:
    """Index of the last byte before `position` that is no space; -1 if there is none."""
    position -= 1
    while position >= 0 and buffer[position] in _SPACE:
        position -= 1
    return position


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, dict) else None


def _opened(path: Path) -> IO[bytes]:
    """The file's content; what it is, is seen from its first bytes, whatever its name."""
    with path.open("rb") as file:
        magic = file.read(2)
    return cast("IO[bytes]", gzip.open(path, "rb")) if magic == b"\x1f\x8b" else path.open("rb")
