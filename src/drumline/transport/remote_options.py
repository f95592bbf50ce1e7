"""Settings of a remote queue, and what a reader needs to connect. Without ZMQ, which only those import who use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from drumline.errors import ConfigError, shown

if TYPE_CHECKING:
    import zmq


_MOST_HEARTBEAT_S = 1_000_000
"""ZMQ counts twice that, in milliseconds, in 32 bits."""


def whole_number(name: str, value: object, least: int | None, most: int | None) -> None:
    """ConfigError unless it is an int from ``least`` to ``most`` (None: any)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is a whole number (int), not {shown(value)}")
    if least == 1 and value < 1:
        raise ConfigError(f"{name} is more than 0, not {shown(value)}")
    if (least is not None and value < least) or (most is not None and value > most):
        limits = f"at least {least}" if most is None else f"at most {most}" if least is None else f"{least} to {most}"
        raise ConfigError(f"{name} is {limits}, not {shown(value)}")


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """Settings of a remote queue; the writer's count, its readers get them with their handles. Seconds and bytes."""

    window_bytes: int = 64 << 20
    """What the writer keeps until all readers have read it. One message may be larger; it goes alone."""
    max_message_bytes: int = 1 << 30
    """Larger messages are refused, by the writer and by readers."""
    heartbeat_s: float = 5.0
    """A silent connection is probed after this time, and ends when it stays silent for twice as long again."""
    reconnect_s: float = 10.0
    """A peer without a connection for this long is gone for good."""
    connect_s: float = 300.0
    """A peer that has not connected for the first time after this long is gone."""

    def __post_init__(self) -> None:
        for name in ("window_bytes", "max_message_bytes"):
            whole_number(name, getattr(self, name), 1, 1 << 62)
        for name in ("heartbeat_s", "reconnect_s", "connect_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ConfigError(f"{name} is a number of seconds, more than 0, not {shown(value)}")
        if self.heartbeat_s > _MOST_HEARTBEAT_S:
            raise ConfigError(f"heartbeat_s is at most {_MOST_HEARTBEAT_S} (11 days), not {shown(self.heartbeat_s)}")


class RemoteHandle(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader needs to connect. It holds the reader's secret key: send it where only that reader gets it."""

    url: str
    index: int
    server_key: bytes
    public_key: bytes
    secret_key: bytes
    options: RemoteOptions

    def __repr__(self) -> str:
        return f"RemoteHandle({self.url}, reader {self.index})"


def configure(sock: zmq.Socket[bytes], options: RemoteOptions) -> None:
    """What both ends set on a new socket."""
    sock.linger = 0
    sock.sndhwm = sock.rcvhwm = 0  # credit bounds what is under way; these would drop
    sock.heartbeat_ivl = max(1, int(options.heartbeat_s * 1000))
    sock.heartbeat_timeout = 2 * sock.heartbeat_ivl
