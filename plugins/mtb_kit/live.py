"""For tests: how many bytes of tensors are alive."""

# ruff: noqa: SLF001  (torch has no public weak references to storages)

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Follows every storage that an operator makes or touches inside the ``with`` block, as long as it lives.

    Attributes:
        peak: the most bytes that were alive after an operator.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, Any] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func`, and look at what it gave."""
        result = func(*args, **(kwargs or {}))
        self._follow((args, kwargs, result))
        self.peak = max(self.peak, self.now())
        return result

    def adopt(self) -> int:
        """Begin with all tensors that Python can reach; returns the bytes that are alive then, which are the peak so far.

        Of distributed tensors the local part counts.
        """
        for found in gc.get_objects():
            # Not isinstance, which has torch warn of some of its own objects.
            if issubclass(type(found), torch.Tensor) and found.layout == torch.strided:
                self._follow(found)
        self.peak = self.now()
        return self.peak

    def now(self) -> int:
        """Bytes alive."""
        total = 0
        for address, weak in list(self._storages.items()):
            if torch.UntypedStorage._expired(weak):
                torch.UntypedStorage._free_weak_ref(weak)
                del self._storages[address]
            else:
                total += torch.UntypedStorage._new_with_weak_ptr(weak).nbytes()
        return total

    def _follow(self, values: Any) -> None:
        for tensor in _tensors(values):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._storages:
                self._storages[storage._cdata] = storage._weak_ref()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        local = getattr(value, "_local_tensor", value)
        if not local.is_meta:
            yield local
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
