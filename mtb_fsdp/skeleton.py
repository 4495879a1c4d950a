"""A module that only names tensors: those of another module, under the names that they have there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
from torch import Tensor, nn


@attrs.frozen
class Names:
    """Parameters and buffers of a module by name, aliases included, in the module's order.

    Attributes:
        persistent: names of the buffers that belong to the state.
    """

    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    persistent: frozenset[str]

    @classmethod
    def of(cls, module: nn.Module) -> Names:
        """Those of `module`."""
        return cls(
            dict(module.named_parameters(remove_duplicate=False)),
            dict(module.named_buffers(remove_duplicate=False)),
            frozenset(module.state_dict(keep_vars=True)),
        )

    def among(self, tensors: Iterable[Tensor]) -> Names:
        """The names of `tensors` only."""
        ids = {id(t) for t in tensors}
        return attrs.evolve(
            self,
            parameters={n: p for n, p in self.parameters.items() if id(p) in ids},
            buffers={n: b for n, b in self.buffers.items() if id(b) in ids},
        )

    def now_in(self, module: nn.Module) -> Names:
        """The same names, with the tensors that `module` has under them."""
        return attrs.evolve(
            self,
            parameters={n: module.get_parameter(n) for n in self.parameters},
            buffers={n: module.get_buffer(n) for n in self.buffers},
        )

    def skeleton(self) -> nn.Module:
        """A tree of empty modules that holds these very tensors; tied ones stay tied."""
        root = nn.Module()
        for name, parameter in self.parameters.items():
            owner, leaf = _owner(root, name)
            owner.register_parameter(leaf, parameter)
        for name, buffer in self.buffers.items():
            owner, leaf = _owner(root, name)
            owner.register_buffer(leaf, buffer, persistent=name in self.persistent)
        return root

    def put_into(self, module: nn.Module) -> None:
        """Make these tensors those of `module`."""
        for name, tensor in (*self.parameters.items(), *self.buffers.items()):
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, tensor)


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:  # noqa: SLF001  (by attribute, a name like 'type' would find a method)
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root, leaf
