"""Where ZMQ's unix sockets live, and for how long.

A unix socket has a name in the file system only so that peers can find it. Peers that are our own processes need no
name: they get a descriptor of the bound socket's file (O_PATH), and ``/proc/self/fd/N`` leads to it even when its name
is gone. So the name exists for less than a millisecond, while no other process exists yet that a SIGKILL of this one
could leave it to::

    server, door = bind_nameless(context, zmq.DEALER)        # nothing is left in the file system here already
    peers = Peers(server)
    ...                                                      # start the peers, give them ``door`` (SCM_RIGHTS)
    peers.wait(n, deadline, alive)                           # or wait for a first message from each of them

    connect(context, zmq.DEALER, door_address(door))         # in the peer; ``door`` stays open while the socket lives

Who cannot be given a descriptor (between containers, say) needs a name for as long as it takes to connect; connections
survive its removal::

    with SocketDir.create() as sockets:              # 0700: nobody else can connect
        server = bind(context, zmq.ROUTER, sockets.address("core"))
        ...
    # here the directory is gone, whether the start worked or not

The path is short: a unix address has 107 bytes, and a temporary folder deep in a home folder may need most of them, so
if TMPDIR is too long, /tmp is taken.

A SIGKILL of the process between creation and removal would leave the folder behind. So its maker holds a lock (flock)
on the folder as long as it lives, and :func:`remove_stale` removes the folders of this user that nobody holds: it runs
at each creation. The lock works across pid namespaces that share a /tmp, where looking up a pid does not.

Abstract addresses (``ipc://@name``) would need no folder, but anyone on the machine may connect to them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from drumline.errors import RPCTimeoutError, TransportError

_LONGEST_ADDRESS = 107  # sun_path of Linux, less the final zero
_LONGEST_NAME = 24
_POLL_MS = 100


def _prefix() -> str:
    return f"drumline-{os.getuid()}-"


ATTEMPTS = 100
"""Folders that are made until one is locked before another process, which starts at the same time, removes it."""


def _bases() -> list[Path]:
    """Folders in which a socket folder may be made, the preferred one first."""
    bases = []
    for text in (tempfile.gettempdir(), "/tmp"):
        base = Path(text)
        longest = len(os.fsencode(base)) + len(_prefix()) + 10 + _LONGEST_NAME
        if longest <= _LONGEST_ADDRESS and base not in bases and os.access(base, os.W_OK | os.X_OK):
            bases.append(base)
    return bases


class SocketDir:
    """A 0700 folder for unix sockets, gone after :meth:`close` (also a context manager)."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls) -> SocketDir:
        """A new folder, locked by this process. Folders left by killed processes of this user are removed first."""
        remove_stale()
        reasons: list[str] = []
        for base in _bases():
            for _ in range(ATTEMPTS):  # another process may take it for a stale one before the lock is there
                try:
                    path = Path(tempfile.mkdtemp(prefix=_prefix(), dir=base))
                except OSError as error:
                    reasons.append(f"{base}: {error.strerror}")
                    break
                lock = _own_folder(path)
                if lock is not None:
                    return cls(path, lock)
                if path.exists():
                    reasons.append(f"{base}: a folder made there has another owner or cannot be locked")
                    with contextlib.suppress(OSError):
                        path.rmdir()
                    break
        where = "; ".join(reasons) or f"{tempfile.gettempdir()} and /tmp are too long or not writable"
        raise TransportError(f"no folder for unix sockets ({where}): set TMPDIR to a short, writable folder")

    def address(self, name: str) -> str:
        """ZMQ address of a socket of this folder; ``name`` has at most 24 ASCII letters, digits, ``-`` or ``_``."""
        plain = name.replace("-", "a").replace("_", "a")
        if not (plain.isascii() and plain.isalnum() and len(name) <= _LONGEST_NAME):
            raise ValueError(f"not a name for a socket: {name!r}")
        return f"ipc://{self.path / name}"

    def close(self) -> None:
        """Remove the sockets' names and the folder; connections stay. Idempotent."""
        if self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> SocketDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _own_folder(path: Path) -> int | None:
    """Lock of a folder that was just made; its mode does not depend on the umask."""
    with contextlib.suppress(OSError):
        path.chmod(0o700)
    return _lock_folder(path, wait=True)


def _lock_folder(path: Path, *, wait: bool) -> int | None:
    """Descriptor that holds the lock on ``path``; None if another holds it, or it is gone or not ours."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        opened = os.fstat(fd)
        if opened.st_uid == os.getuid() and not stat.S_IMODE(opened.st_mode) & 0o077:  # setgid is inherited
            fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(opened, path.stat()):
                return fd
    except OSError:
        pass
    os.close(fd)
    return None


def remove_stale() -> list[Path]:
    """Remove socket folders of this user whose makers are dead; those that were removed."""
    removed = []
    for base in _bases():
        for path in base.glob(f"{_prefix()}*"):
            lock = _lock_folder(path, wait=False)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
                removed.append(path)
    return removed


def bind(context: zmq.Context[Any], kind: int, address: str, **options: int) -> zmq.Socket[Any]:
    """A bound socket of ``kind``; ``options`` are ZMQ's by name in small letters (``sndhwm=0``). LINGER is 0."""
    return _open(context, kind, options, lambda socket: socket.bind(address))


def bind_nameless(context: zmq.Context[Any], kind: int, **options: int) -> tuple[zmq.Socket[Any], int]:
    """A bound socket without a name, and the descriptor that lets its holder connect (:func:`door_address`).

    The caller owns both. Options as for :func:`bind`.
    """
    with SocketDir.create() as sockets:
        socket = bind(context, kind, sockets.address("door"), **options)
        try:
            return socket, os.open(sockets.path / "door", os.O_PATH | os.O_CLOEXEC)
        except BaseException:
            socket.close(0)
            raise


def door_address(door: int) -> str:
    """ZMQ address for a process that holds this descriptor of a nameless socket."""
    return f"ipc:///proc/self/fd/{door}"


def connect(context: zmq.Context[Any], kind: int, address: str, **options: int) -> zmq.Socket[Any]:
    """A socket of ``kind`` that connects to ``address`` (in the background); options as for :func:`bind`."""
    return _open(context, kind, options, lambda socket: socket.connect(address))


def _open(
    context: zmq.Context[Any], kind: int, options: dict[str, int], action: Callable[[zmq.Socket[Any]], object]
) -> zmq.Socket[Any]:
    socket: zmq.Socket[Any] = context.socket(kind)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name.upper()), value)
        action(socket)
    except BaseException:
        socket.close(0)
        raise
    return socket


class Peers:
    """Counts the peers that are connected to a bound socket (plain or asyncio). Make it before they connect.

    On an asyncio loop: ``await asyncio.to_thread(peers.wait, ...)``, before the socket is used for anything else.
    """

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        address = f"inproc://peers-{id(self)}-{time.monotonic_ns()}"
        socket.monitor(address, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._socket: zmq.Socket[Any] | None = socket
        plain: zmq.Context[Any] = zmq.Context.shadow(socket.context.underlying)
        self._events: zmq.Socket[Any] = plain.socket(zmq.PAIR)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.connect(address)
        self.connected = 0

    def poll(self, timeout_s: float = 0.0) -> int:
        """Peers connected now; waits up to ``timeout_s`` seconds for the next change."""
        wait_ms = int(timeout_s * 1000)
        while self._events.poll(wait_ms):
            event = parse_monitor_message(self._events.recv_multipart())["event"]
            self.connected += 1 if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else -1
            wait_ms = 0
        return self.connected

    def wait(self, count: int, deadline: float, alive: Callable[[], None] | None = None) -> None:
        """Wait until ``count`` peers are connected; then, or on failure, stop counting.

        ``alive`` (called at least every 100 ms) raises if a peer died; RPCTimeoutError at ``deadline``
        (``time.monotonic()``).
        """
        try:
            while self.poll() < count:
                if alive is not None:
                    alive()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise RPCTimeoutError(f"{self.connected} of {count} peers connected before the deadline")
                self.poll(min(left, _POLL_MS / 1000))
        finally:
            self.close()

    def close(self) -> None:
        """Stop counting; the socket stays. Idempotent."""
        if self._socket is None:
            return
        socket, self._socket = self._socket, None
        with contextlib.suppress(zmq.ZMQError):  # the socket was closed first
            socket.disable_monitor()
        self._events.close(0)
