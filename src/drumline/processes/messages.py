"""Messages of the control connections, and of the connection between the fork server and its clients.

All are msgspec structs with a tag; :mod:`drumline.processes.connection` frames them and carries their descriptors.
"""

from __future__ import annotations

import msgspec

from drumline.errors import FailureReport

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
    """First message of the root. Descriptors: the root's pidfd."""

    role: str
    pid: int
    sys_path: list[str]
    preload: list[str]
    env: dict[str, str]
    """Environment of the root as it is: the base of every child's."""
    log_dir: str
    log_level: str
    console_fd: int
    grace_s: float = 1.0


class Spawn(msgspec.Struct, tag="spawn", kw_only=True):
    """Make a child. Descriptors: its end of the control connection, then those that it is to have."""

    key: int
    role: str
    target: str
    payload: bytes = b""
    rank: int | None = None
    env: dict[str, str | None] = {}
    threads: int = 0
    cpus: list[int] = []
    numa_node: int | None = None
    forkserver_access: bool = False
    fresh: bool = False


class Shutdown(msgspec.Struct, tag="shutdown"):
    """End all children and yourself, without a report."""


ToServer = Begin | Spawn | Shutdown

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


ToClient = ServerPhase | ServerReady | ServerFailed | Spawned | SpawnFailed | Exited

# ---- fork server to a child that is executed fresh -----------------------------------------------------------------


class FreshSpec(msgspec.Struct, kw_only=True):
    """What a child that is executed instead of forked reads from the descriptor that it is given."""

    spawn: Spawn
    env: dict[str, str]
    """The whole environment that the child's code is to see."""
    sys_path: list[str]
    server_pid: int
    conn_fd: int
    fds: list[int]
    server_fd: int
    """Connection to the fork server, or -1."""
    console_fd: int
    log_dir: str
    log_level: str
    grace_s: float
