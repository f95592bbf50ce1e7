"""Addresses: the one place where hosts and ports become what sockets and ZMQ want, for IPv4 and IPv6 alike."""

from __future__ import annotations

import ipaddress
import socket

from drumline.errors import ConfigError


def resolve(host: str) -> tuple[socket.AddressFamily, str]:
    """Family and numeric address of ``host`` (a name, or an address with or without brackets).

    ConfigError if it has none. A name with addresses of both families gives its first one.
    """
    bare = host.removeprefix("[").removesuffix("]")
    try:
        found = socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        raise ConfigError(f"host {host!r} has no address: {exc}") from None
    for family, _, _, _, address in found:
        if family in (socket.AF_INET, socket.AF_INET6):
            return family, str(address[0])
    raise ConfigError(f"host {host!r} has neither an IPv4 nor an IPv6 address")


def resolve_own(host: str) -> tuple[socket.AddressFamily, str]:
    """Like :func:`resolve` for an address to listen on: one that peers can be told, so no wildcard."""
    family, address = resolve(host) if host not in ("", "*") else (socket.AF_INET, "0.0.0.0")
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        raise ConfigError(f"name the address that the peers can reach: {host!r} would listen on all of them")
    return family, address


def tcp_url(address: str, port: int) -> str:
    """``tcp://address:port``, with brackets where they belong."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def listen(host: str, port: int, backlog: int) -> tuple[socket.socket, str]:
    """A socket that listens on this one address (port 0: any free one), and its URL.

    ConfigError if the address is not ours or the port is taken: the message says which.
    """
    family, address = resolve_own(host)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen(backlog)
    except OSError as exc:
        sock.close()
        raise ConfigError(f"cannot listen on {tcp_url(address, port)}: {exc.strerror}") from None
    return sock, tcp_url(address, sock.getsockname()[1])
