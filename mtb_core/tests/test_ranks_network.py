import socket

import pytest

from mtb_core.api import ConfigError
from mtb_core.config import TrainConfig
from mtb_core.ranks.network import check_network, interfaces, local_address, split_endpoint

TWO = TrainConfig(nproc=2)


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)


def nodes(endpoint):
    return TrainConfig(nnodes="2", rdzv_endpoint=endpoint)


def test_nothing_set_is_fine():
    """Without settings there is nothing to refuse."""
    check_network(TWO)


@pytest.mark.parametrize("value", ["nope0", "^lo", "127.0.0.1", "lo,nope0", "=lo"])
def test_bad_gloo_interface(monkeypatch, value):
    """A missing interface, NCCL's notation and an address are refused, with the variable and what there is."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
    with pytest.raises(ConfigError) as info:
        check_network(TWO)
    text = str(info.value)
    assert "GLOO_SOCKET_IFNAME" in text
    assert repr(value) in text
    assert ", ".join(interfaces()) in text
    check_network(TrainConfig(nproc=1))


def test_good_gloo_interface(monkeypatch):
    """An interface that exists is accepted."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    check_network(TWO)


@pytest.mark.parametrize(
    ("value", "good"), [("lo", True), ("l", True), ("=l", False), ("nope", False), ("10.0.0.1", False)]
)
def test_nccl_interface(monkeypatch, value, good):
    """NCCL's variable takes prefixes, exact names with ``=``; what leaves nothing is refused; cpu runs ignore it."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    if good:
        check_network(TWO)
    else:
        with pytest.raises(ConfigError, match="NCCL_SOCKET_IFNAME"):
            check_network(TWO)
    check_network(TrainConfig(nproc=2, device="cpu"))


def test_nccl_exclusion(monkeypatch):
    """``^NAME`` leaves interfaces out, and is refused where none is left."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^nope")
    check_network(TWO)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^" + ",".join(interfaces()))
    with pytest.raises(ConfigError, match="leaves no interface"):
        check_network(TWO)


def test_unresolvable_host(monkeypatch):
    """A host that has no address is refused by name."""

    def fail(*_args, **_kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(ConfigError, match=r"'no-such-host' of --rdzv-endpoint cannot be resolved"):
        check_network(nodes("no-such-host:29500"))


def test_port_in_use():
    """A port that another program holds is refused; a store of torch is another launcher of the run."""
    import torch.distributed as dist

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"Port {port} of --rdzv-endpoint is in use"):
            check_network(nodes(f"127.0.0.1:{port}"))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    check_network(nodes(f"127.0.0.1:{store.port}"))


@pytest.mark.parametrize(
    ("endpoint", "parts"),
    [("host:1", ("host", 1)), ("host", ("host", 29400)), ("[::1]:5", ("::1", 5)), ("[::1]", ("::1", 29400))],
)
def test_endpoints(endpoint, parts):
    """Host and port are told apart; the port has a default."""
    assert split_endpoint(endpoint) == parts


@pytest.mark.parametrize("endpoint", [":1", "host:x", "host:70000", ""])
def test_bad_endpoints(endpoint):
    """What is no HOST:PORT is refused."""
    with pytest.raises(ConfigError, match="HOST:PORT"):
        split_endpoint(endpoint)


def test_address_towards_this_machine():
    """This machine reaches itself over the loopback address."""
    assert local_address("127.0.0.1") == "127.0.0.1"
