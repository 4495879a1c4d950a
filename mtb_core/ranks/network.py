"""Interfaces, hosts and ports: what can be known to be wrong before any rank starts, and defaults that work."""

from __future__ import annotations

import errno
import ipaddress
import multiprocessing
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mtb_core.api.errors import ConfigError
from mtb_core.api.layout import World

if TYPE_CHECKING:
    from mtb_core.config.schema import TrainConfig

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
DEFAULT_PORT = 29400
#: Environment variables that are set at the moment by mtb, not by whoever started it: the same run sets them again.
set_here: set[str] = set()

_Address = tuple[socket.AddressFamily, socket.SocketKind, Any]


def interfaces() -> list[str]:
    """Names of this machine's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def loopback() -> str | None:
    """Name of the loopback interface; None where there is none of a usual name."""
    return next((name for name in ("lo", "lo0") if name in interfaces()), None)


@contextmanager
def single_node_interface(world: World) -> Iterator[None]:
    """Let gloo use the loopback interface where all ranks are on one machine, unless the user chose another.

    Otherwise gloo asks for the address of the host name, which need not have one.
    """
    name = loopback()
    if world.size != world.local_size or name is None or os.environ.get(GLOO):
        yield
        return
    os.environ[GLOO] = name
    set_here.add(GLOO)
    try:
        yield
    finally:
        set_here.discard(GLOO)
        os.environ.pop(GLOO, None)


def check_network(config: TrainConfig) -> None:
    """Find what would keep ranks from meeting, before any of them starts.

    Raises:
        ConfigError: GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names no interface of this machine, the host of
            --rdzv-endpoint cannot be resolved, or its port is taken on this machine by something else.
    """
    if config.nproc * config.max_nodes == 1:
        return
    check_interfaces(config.device, config.backend)
    if config.rdzv_endpoint is not None:
        host, port = split_endpoint(config.rdzv_endpoint)
        _check_endpoint(host, port)


def check_interfaces(device: str, backend: str) -> None:
    """Refuse GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME that name no interface of this machine, as far as they matter.

    Raises:
        ConfigError: the message lists the interfaces that there are.
    """
    if backend != "nccl" and os.environ.get(GLOO):
        _check_gloo(os.environ[GLOO])
    if device != "cpu" and backend != "gloo" and os.environ.get(NCCL):
        _check_nccl(os.environ[NCCL])


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of ``HOST[:PORT]`` (``[ADDRESS]:PORT`` for IPv6).

    Raises:
        ConfigError: it is not of that form.
    """
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        host, port = endpoint, str(DEFAULT_PORT)
    if not host or not port.isdigit() or int(port) >= 2**16:
        msg = f"--rdzv-endpoint is {endpoint!r}; valid: HOST:PORT with a port from 0 to 65535."
        raise ConfigError(msg)
    return host.strip("[]"), int(port)


def local_address(host: str) -> str:
    """The address of this machine under which `host` can reach it; the loopback address for this machine itself."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # a datagram socket: this only looks up the route
        return str(probe.getsockname()[0])


def _check_gloo(value: str) -> None:
    for name in value.split(","):
        if name.startswith(("^", "=")):
            problem = f"which is NCCL's way to write; gloo takes plain names and no '{name[0]}'"
        elif _is_address(name):
            problem = "which is an address; gloo takes the name of an interface"
        elif name not in interfaces():
            problem = f"but this machine has no interface {name!r}"
        else:
            continue
        raise _bad_interface(GLOO, value, problem, "one of these names")


def _check_nccl(value: str) -> None:
    """NCCL takes a list of prefixes; a leading ``^`` excludes them, a leading ``=`` asks for exact names."""
    mark, names = (value[0], value[1:]) if value[0] in "^=" else ("", value)
    for name in names.split(","):
        if _is_address(name):
            problem = "which is an address; NCCL takes names of interfaces"
            raise _bad_interface(NCCL, value, problem, "a name, or ^NAME to leave one out")
    found = [i for i in interfaces() if _matches(i, names.split(","), exact=mark == "=") == (mark != "^")]
    if not found:
        problem = "which leaves no interface of this machine"
        raise _bad_interface(NCCL, value, problem, "the beginning of one of these names, or ^NAME to leave one out")


def _matches(interface: str, names: list[str], *, exact: bool) -> bool:
    return any(interface == name if exact else interface.startswith(name) for name in names)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _bad_interface(variable: str, value: str, problem: str, valid: str) -> ConfigError:
    return ConfigError(
        f"The environment variable {variable} is {value!r}, {problem}. Interfaces of this machine: "
        f"{', '.join(interfaces())}. Set {variable} to {valid}, or unset it."
    )


def _check_endpoint(host: str, port: int) -> None:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        msg = (
            f"The host {host!r} of --rdzv-endpoint cannot be resolved ({error.strerror}). "
            "Give a name that every node can resolve, or the address of the first node."
        )
        raise ConfigError(msg) from error
    addresses: list[_Address] = [(family, kind, address) for family, kind, _, _, address in found]
    if port and _taken(addresses) and not _is_store(host, port):
        msg = (
            f"Port {port} of --rdzv-endpoint is in use on this machine by another program. "
            "Choose a free port, the same on every node."
        )
        raise ConfigError(msg)


def _taken(addresses: list[_Address]) -> bool:
    """True if one of the addresses is this machine's and already listened to."""
    for family, kind, address in addresses:
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:  # EADDRNOTAVAIL: another machine's address
                if error.errno == errno.EADDRINUSE:
                    return True
    return False


def _is_store(host: str, port: int) -> bool:
    """True if a store of torch answers there: another launcher of this run is already up on this machine."""
    import torch  # noqa: F401, PLC0415  (before the fork, which then has it)

    # In a process that can be ended: torch's client waits for an answer for ever.
    probe = multiprocessing.get_context("fork").Process(target=_ask_store, args=(host, port), daemon=True)
    probe.start()
    probe.join(3.0)
    probe.kill()
    return probe.exitcode == 0


def _ask_store(host: str, port: int) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what torch writes about a failed attempt
    dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=2)).add("mtb/probe", 0)
