"""For tests: how many bytes of tensors are alive."""

from __future__ import annotations

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
        super().__init__()
        self._storages: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func`, and look at what it gave."""
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors((args, kwargs, result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._storages:
                self._storages[storage._cdata] = storage._weak_ref()
        self.peak = max(self.peak, self.now())
        return result

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
