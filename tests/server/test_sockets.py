from __future__ import annotations

import contextlib
import os
import socket

import pytest

from drumline.errors import ConfigError
from drumline.server.sockets import bind, is_loopback, join, listeners, url


def test_a_used_port_is_said_so() -> None:
    (taken,) = bind("127.0.0.1", 0)
    with taken, pytest.raises(ConfigError, match=r"already in use.*--port"):
        bind("127.0.0.1", taken.getsockname()[1])


def test_unknown_hosts() -> None:
    with pytest.raises(ConfigError, match=r"--host"):
        bind("no.such.host.invalid", 0)
    with pytest.raises(ConfigError, match=r"Cannot listen on 203.0.113.7"):
        bind("203.0.113.7", 0)


def test_connections_wait_before_anybody_accepts() -> None:
    (sock,) = bind("127.0.0.1", 0)
    with sock, socket.create_connection(sock.getsockname(), timeout=2):
        assert not sock.get_inheritable()


@pytest.mark.parametrize("host", ["::1", "localhost", "::", "0.0.0.0"])
def test_hosts(host: str) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        sockets = bind(host, 0)
    except ConfigError:
        pytest.skip(f"{host} does not exist here")
    with contextlib.ExitStack() as stack:
        for sock in sockets:
            stack.enter_context(sock)
        assert len({sock.getsockname()[1] for sock in sockets}) == 1
        address = url(sockets[0])
        assert address.startswith("http://[::1]:" if ":" in host else "http://")
        port = int(address.rpartition(":")[2])
        peer = address.removeprefix("http://").rpartition(":")[0].strip("[]")
        socket.create_connection((peer, port), timeout=2).close()
        mine = [row for row in listeners([("me", os.getpid())]) if row.address.endswith(f":{port}")]
        assert len(mine) == len(sockets)
        assert all(row.loopback == (host not in ("::", "0.0.0.0")) for row in mine)


def test_names() -> None:
    assert join("::1", 80) == "[::1]:80"
    assert join("127.0.0.1", 80) == "127.0.0.1:80"
    assert is_loopback("127.0.0.53")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert listeners([("gone", 2**22 + 1)]) == []
