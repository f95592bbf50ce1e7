"""Messages of the control connections, and of the connection between the fork server and its clients.

All are msgspec structs with a tag; :mod:`drumline.processes.connection` frames them and carries their descriptors.

Text is UTF-8 on the wire, but Python's ``str`` may hold lone surrogates (in the text of any exception): :func:`encode`
writes these as backslash escapes, for no failure may be lost because of its text. Names and values of environment
variables, and paths, must arrive unchanged and need not be UTF-8, so they travel as bytes (:func:`pack_env`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from drumline.errors import FailureReport

_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    """msgpack bytes of a message of any room; lone surrogates in its texts become ``\\udcXX``."""
    try:
        return _ENCODER.encode(message)
    except UnicodeEncodeError:
        return _ENCODER.encode(_writable(msgspec.to_builtins(message, builtin_types=(bytes, bytearray, memoryview))))


def _writable(value: Any) -> Any:
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {_writable(key): _writable(one) for key, one in value.items()}
        case list() | tuple():
            return [_writable(one) for one in value]
    return value


def pack_env(env: Mapping[str, str | None]) -> dict[bytes, bytes | None]:
    """Environment variables as they travel."""
    return {os.fsencode(name): None if value is None else os.fsencode(value) for name, value in env.items()}


def unpack_env(env: Mapping[bytes, bytes | None]) -> dict[str, str | None]:
    """And back; values that no ``str`` of UTF-8 can hold have surrogates, as in ``os.environ``."""
    return {os.fsdecode(name): None if value is None else os.fsdecode(value) for name, value in env.items()}


# ---- child to owner ------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello"):
    """First word of a child; sent again when its name or log file changes."""

    pid: int
    name: str
    log_file: str = ""


class Phase(msgspec.Struct, tag="phase"):
    """What the child is doing now; counts as progress."""

    text: str


class Ready(msgspec.Struct, tag="ready"):
    """The child is ready; ``info`` means something to its owner only."""

    info: bytes = b""


class Data(msgspec.Struct, tag="data"):
    """Bytes that mean something to owner and child only (both directions)."""

    data: bytes


class Failed(msgspec.Struct, tag="failed"):
    """The child failed and is about to end."""

    report: FailureReport


# ---- owner to child ------------------------------------------------------------------------------------------------


class Stop(msgspec.Struct, tag="stop"):
    """Please end."""


ToOwner = Hello | Phase | Ready | Data | Failed
ToChild = Stop | Data

# ---- client to fork server -----------------------------------------------------------------------------------------


class Begin(msgspec.Struct, tag="begin", kw_only=True):
    """First message of the root. Descriptors: the root's pidfd, and the console if there is one."""

    role: str
    pid: int
    sys_path: list[bytes]
    preload: list[str]
    env: dict[bytes, bytes | None]
    """Environment of the root as it is: the base of every child's."""
    log_dir: bytes
    log_level: str
    grace_s: float = 1.0
    copies: bool = False
    """It is there to be copied: see :class:`Copy`."""


class Spawn(msgspec.Struct, tag="spawn", kw_only=True):
    """Make a child. Descriptors: its end of the control connection, then those that it is to have."""

    key: int
    role: str
    target: str
    payload: bytes = b""
    rank: int | None = None
    env: dict[bytes, bytes | None] = {}
    threads: int = 0
    cpus: list[int] = []
    numa_node: int | None = None
    forkserver_access: bool = False
    fresh: bool = False


class Shutdown(msgspec.Struct, tag="shutdown"):
    """End all children and yourself, without a report."""


class Clear(msgspec.Struct, tag="clear"):
    """Kill all children and what they left, say :class:`Cleared` when they are gone, and go on. From the root."""


class Spare(msgspec.Struct, tag="spare"):
    """Fork a copy of yourself that waits, for the case of your death. Descriptors: its connection, the root's pidfd."""


class Copy(msgspec.Struct, tag="copy"):
    """Fork a copy of yourself that becomes a fork server of its own: it awaits its :class:`Begin`. Descriptors: its
    connection."""


ToServer = Begin | Spawn | Shutdown | Clear | Spare | Copy

# ---- fork server to client -----------------------------------------------------------------------------------------


class ServerPhase(msgspec.Struct, tag="server_phase"):
    """What the fork server is doing (importing what)."""

    text: str
    log_file: str = ""


class ServerReady(msgspec.Struct, tag="server_ready"):
    """Imports are done. With ``obstacles`` children are executed fresh instead of forked."""

    obstacles: list[str] = []
    seconds: dict[str, float] = {}
    """Import time of each preloaded module."""


class ServerFailed(msgspec.Struct, tag="server_failed"):
    """The fork server cannot go on and ends."""

    report: FailureReport


class Spawned(msgspec.Struct, tag="spawned"):
    """A child exists. Descriptor: its pidfd."""

    key: int
    pid: int
    fresh: bool = False


class SpawnFailed(msgspec.Struct, tag="spawn_failed"):
    """A child could not be made."""

    key: int
    report: FailureReport


class Exited(msgspec.Struct, tag="exited", kw_only=True):
    """A child ended. Exactly one of ``code`` and ``signal`` is set."""

    key: int
    code: int | None = None
    signal: int | None = None
    oom: bool = False
    time: float = 0.0


class Cleared(msgspec.Struct, tag="cleared"):
    """There are no children any more."""


class SpareReady(msgspec.Struct, tag="spare_ready"):
    """There is a spare or copy; said by the fork server that made it, on the new one's connection. Descriptor: its
    pidfd."""

    pid: int
    log_file: str
    seconds: dict[str, float] = {}


class SpareEnded(msgspec.Struct, tag="spare_ended"):
    """A spare has ended; said by the fork server that made it."""

    pid: int


ToClient = ServerPhase | ServerReady | ServerFailed | Spawned | SpawnFailed | Exited | Cleared | SpareReady | SpareEnded

# ---- fork server to a child that is executed fresh -----------------------------------------------------------------


class FreshSpec(msgspec.Struct, kw_only=True):
    """What a child that is executed instead of forked reads from the descriptor that it is given."""

    spawn: Spawn
    env: dict[bytes, bytes | None]
    """The whole environment that the child's code is to see."""
    sys_path: list[bytes]
    server_pid: int
    conn_fd: int
    fds: list[int]
    server_fd: int
    """Connection to the fork server, or -1."""
    console_fd: int
    log_dir: bytes
    log_level: str
    grace_s: float
    root_role: str = ""
    root_pid: int = 0
    of_root: bool = False
    own: bool = False
    allowed: tuple[int, ...] = ()
