"""Addresses of the HTTP port: bind first, before anything slow, and keep what was bound.

A used port is so a plain usage error of the command, no port is probed and bound again later, and connections that
arrive before the event loop runs wait in the kernel's queue instead of being refused.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from drumline.errors import ConfigError

BACKLOG = 2048


def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for every address of ``host``. Port 0: one that is free, the same for all of them.

    ConfigError says in one line why it cannot be.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port}: a port is a number from 0 to 65535 (0: any free one).")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as e:
        raise ConfigError(f"--host {host}: no such host ({e}).") from None
    bound: list[socket.socket] = []
    unusable: OSError | None = None
    for family, kind, proto, _, address in dict.fromkeys(found):
        try:
            bound.append(_listen(family, kind, proto, (address[0], port, *address[2:])))
        except OSError as e:
            # "localhost" may name ::1 on a host without IPv6: one address that works is enough.
            if e.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                unusable = e
                continue
            for other in bound:
                other.close()
            raise ConfigError(_refusal(host, port, e)) from None
        port = bound[0].getsockname()[1]
    if not bound:
        raise ConfigError(_refusal(host, port, unusable or OSError("no address")))
    return bound


def _listen(family: int, kind: int, proto: int, address: tuple[object, ...]) -> socket.socket:
    """One listening, non-inheritable socket."""
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # "::" alone takes IPv4 too; together with an IPv4 socket of the same host it must not.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _refusal(host: str, port: int, error: OSError) -> str:
    """Why a port cannot be had, and what to change."""
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is already in use. Choose another one with --port (0: any free one)."
    if error.errno == errno.EACCES:
        return f"Port {port} on {host} needs more rights than this user has. Choose one above 1023 with --port."
    return f"Cannot listen on {host} port {port}: {os.strerror(error.errno) if error.errno else error}."


def is_loopback(address: str) -> bool:
    """True if only this machine can reach it."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"


_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]+))(?::[0-9]*)?", re.IGNORECASE)


def names_this_machine(host: str, bound: str) -> bool:
    """True if a ``Host`` header names this machine from within: localhost, a loopback address, or ``bound``."""
    match = _HOST.fullmatch(host.strip())
    if match is None:
        return False
    name = (match[1] or match[2]).lower()
    return is_loopback(name) or name == bound.lower()


def join(host: str, port: int) -> str:
    """``host:port`` with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url(sock: socket.socket) -> str:
    """URL under which a client on this machine reaches the socket."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://{join(host, port)}"


@dataclass(frozen=True, kw_only=True)
class Listener:
    """One listening TCP socket of one of our processes."""

    process: str
    pid: int
    address: str
    loopback: bool


def listeners(processes: Sequence[tuple[str, int]]) -> list[Listener]:
    """Listening TCP sockets of the given (name, pid), as the kernel tells; processes that are gone are left out."""
    found = []
    for name, pid in processes:
        try:
            connections = psutil.Process(pid).net_connections(kind="tcp")
        except (psutil.Error, OSError):
            continue
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN and connection.laddr:
                host, port = connection.laddr.ip, connection.laddr.port
                found.append(Listener(process=name, pid=pid, address=join(host, port), loopback=is_loopback(host)))
    return sorted(set(found), key=lambda row: (row.process, row.address))
