"""Reading pickles without unpickling: the opcodes that describe plain values and objects, and nothing that runs.

`torch.distributed.checkpoint` keeps its index as a pickle, and ``torch.save`` describes each tensor by one. Here their
opcodes are interpreted into inert values. No class is looked up and nothing is called: a name stands for what the
caller's table says, every other name and every other opcode is refused. Memory grows with the length of the pickle.
"""

# ruff: noqa: TRY004  (a wrong type in a file is a wrong value)

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

import attrs

#: Bytes of a pickle to each list, table, tuple and object in it, at least; each takes up to a hundred of memory.
_BYTES_A_VALUE = 3
_SLACK = 1024

_MARK = object()


@attrs.frozen
class Name:
    """Stand-in for a global name in a pickle; readers know its objects by `kind`."""

    kind: str


@attrs.define(eq=False)
class Inert:
    """An object as a pickle describes it: what it was made of, and the state that was put into it."""

    kind: str
    args: tuple[Any, ...]
    state: Any = None


@attrs.frozen
class Persistent:
    """Object that a pickle refers to by an identity of its own."""

    identity: Any


def read_pickle(data: bytes, names: Mapping[tuple[str, str], Any]) -> Any:
    """The value that the pickle `data` describes.

    Args:
        data: the pickle.
        names: (module, name) to a `Name`, or to the value that stands for it.

    Returns:
        None, booleans, integers, texts, tuples, lists, tables and `Inert` objects.

    Raises:
        ValueError: anything else is in it; names it.
    """
    reader = _Reader(data, names)
    try:
        return reader.run()
    except ValueError:
        raise
    except (IndexError, KeyError, TypeError, struct.error) as error:
        raise ValueError(f"it is no pickle ({type(error).__name__}: {error})") from error


class _Reader:
    def __init__(self, data: bytes, names: Mapping[tuple[str, str], Any]) -> None:
        self._data, self._names, self._at = data, names, 0
        self._stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self._left = _SLACK + len(data) // _BYTES_A_VALUE
        self._table = _opcodes()

    def run(self) -> Any:
        """Until STOP."""
        while True:
            code = self.take(1)[0]
            if code == 0x2E:
                (value,) = self._stack
                return value
            action = self._table.get(code)
            if action is None:
                raise ValueError(
                    f"it has the opcode {bytes([code])!r} at byte {self._at - 1}, which has no place there"
                )
            action(self)

    def take(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > len(self._data):
            raise ValueError("it ends too early")
        return self._data[start : self._at]

    def skip(self, count: int) -> None:
        self.take(count)

    def number(self, form: str) -> int:
        value: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def line(self) -> str:
        end = self._data.index(b"\n", self._at)
        text = self.take(end - self._at).decode()
        self._at += 1
        return text

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def add(self, value: Any) -> None:
        """`push` of something that takes memory."""
        self._left -= 1
        if self._left < 0:
            raise ValueError("it has more values than its length allows")
        self._stack.append(value)

    def to_mark(self) -> list[Any]:
        """Values pushed since the last mark, which is removed."""
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is _MARK:
                found = self._stack[place + 1 :]
                del self._stack[place:]
                return found
        raise ValueError("a mark is missing")

    def pop(self, count: int) -> tuple[Any, ...]:
        if len(self._stack) < count:
            raise ValueError("it takes values that are not there")
        found = tuple(self._stack[len(self._stack) - count :])
        del self._stack[len(self._stack) - count :]
        return found

    def name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name in it is not a text")
        if (module, name) not in self._names:
            raise ValueError(f"it asks for {module[:60]}.{name[:60]}, which has no place there")
        self.push(self._names[module, name])

    def long(self) -> None:
        count = self.take(1)[0]
        self.push(int.from_bytes(self.take(count), "little", signed=True))

    def unicode(self, form: str) -> None:
        self.push(self.take(self.number(form)).decode())  # refuses halves of surrogate pairs

    def stack_global(self) -> None:
        self.name(*self.pop(2))

    def make(self) -> None:
        known, args = self.pop(2)
        if not isinstance(known, Name) or not isinstance(args, tuple):
            raise ValueError("it calls something that cannot be called")
        self.add(Inert(known.kind, args))

    def build(self) -> None:
        (state,) = self.pop(1)
        made = self._stack[-1]
        if not isinstance(made, Inert) or made.state is not None:
            raise ValueError("it gives a state to what has none")
        made.state = state

    def append(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise ValueError("it appends to what is no list")
        target += values

    def set(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(values) % 2:
            raise ValueError("it sets items of what is no table")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) not in {str, int, Inert}:  # a tuple may take for ever to be hashed
                raise ValueError(f"a key in it is a {type(key).__name__}")
            target[key] = value

    def put(self, place: int) -> None:
        if len(self.memo) > _SLACK + len(self._data) // 2:
            raise ValueError("it notes more values than its length allows")
        self.memo[place] = self._stack[-1]

    def get(self, place: int) -> None:
        self.push(self.memo[place])

    def tuple(self, values: list[Any] | tuple[Any, ...]) -> None:
        self.add(tuple(values))


def _opcodes() -> dict[int, Callable[[_Reader], None]]:
    """By code; see `pickletools` for what each means."""
    r = _Reader
    table: dict[bytes, Callable[[_Reader], None]] = {
        b"\x80": lambda s: s.skip(1),  # PROTO
        b"\x95": lambda s: s.skip(8),  # FRAME
        b"(": lambda s: s.push(_MARK),
        b"N": lambda s: s.push(None),
        b"\x88": lambda s: s.push(True),
        b"\x89": lambda s: s.push(False),
        b"K": lambda s: s.push(s.number("<B")),
        b"M": lambda s: s.push(s.number("<H")),
        b"J": lambda s: s.push(s.number("<i")),
        b"\x8a": r.long,
        b"X": lambda s: s.unicode("<I"),
        b"\x8c": lambda s: s.unicode("<B"),
        b"\x8d": lambda s: s.unicode("<Q"),
        b"}": lambda s: s.add({}),
        b"]": lambda s: s.add([]),
        b")": lambda s: s.push(()),
        b"\x85": lambda s: s.tuple(s.pop(1)),
        b"\x86": lambda s: s.tuple(s.pop(2)),
        b"\x87": lambda s: s.tuple(s.pop(3)),
        b"t": lambda s: s.tuple(s.to_mark()),
        b"a": lambda s: s.append(list(s.pop(1))),
        b"e": lambda s: s.append(s.to_mark()),
        b"s": lambda s: s.set(list(s.pop(2))),
        b"u": lambda s: s.set(s.to_mark()),
        b"\x94": lambda s: s.put(len(s.memo)),
        b"q": lambda s: s.put(s.number("<B")),
        b"r": lambda s: s.put(s.number("<I")),
        b"h": lambda s: s.get(s.number("<B")),
        b"j": lambda s: s.get(s.number("<I")),
        b"c": lambda s: s.name(s.line(), s.line()),
        b"\x93": r.stack_global,
        b"R": r.make,
        b"\x81": r.make,
        b"b": r.build,
        b"Q": lambda s: s.add(Persistent(*s.pop(1))),
    }
    return {code[0]: action for code, action in table.items()}
