"""Rendezvous of the launchers of several nodes; one node meets nobody."""

from __future__ import annotations

import socket
import uuid
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from mtb_core.launch import local_address, split_endpoint

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"


def many_nodes(endpoint: str, min_nodes: int, max_nodes: int) -> RendezvousHandler:
    """The c10d rendezvous of torch at `endpoint`, which one of the nodes hosts."""
    host, port = split_endpoint(endpoint)
    address = local_address(host)
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"{host}:{port}",
        run_id=f"mtb-{host}-{port}",
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        local_addr=address,
    )
    backend, store = create_backend(parameters)
    return create_handler(store, backend, parameters)


class OneNode(RendezvousHandler):
    """A rendezvous of one node: no waiting, no host name, and a store that listens on the loopback address only."""

    def __init__(self) -> None:
        self._run_id = uuid.uuid4().hex
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """Name for torch's records."""
        return "one-node"

    @property
    def use_agent_store(self) -> bool:
        """Ranks use the launcher's store instead of making one, so no port has to be guessed."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """A new store for each attempt."""
        with socket.create_server((LOOPBACK, 0)) as listener:
            port = listener.getsockname()[1]
            self._store = dist.TCPStore(
                LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def is_closed(self) -> bool:
        """Nobody can close it."""
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def num_nodes_waiting(self) -> int:
        """Nobody else comes."""
        return 0

    def get_run_id(self) -> str:
        """Unique."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the store."""
        self._store = None
        return True
