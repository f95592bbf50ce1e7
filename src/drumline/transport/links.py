"""The link between a queue's writer and one local reader: who is there, who has died, who has closed.

::

    writer  <---- socketpair: one byte for each piece of news ---->  reader
            WRITER + pidfd, put there before the reader exists
                                      READER + pid, pidfd: attached
            CLOSED: nothing more comes                               CLOSED: will not read any more

Messages never go here. Each side has the other's pidfd, so a kill is known at once even where a forked process has
inherited an end of the socket (and its end of file would not come).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from drumline.errors import TransportError

_HELLO, _CLOSED = b"H", b"C"
_PID = struct.Struct("<I")


class Link:
    """One end. :meth:`look` after its descriptors woke says whether it is over."""

    def __init__(self, sock: socket.socket, who: str) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._who = who
        self._maker = os.getpid()
        self._pidfd = -1
        self.pid = 0
        """Of the other side; 0 until it has attached."""
        self.over = ""
        """Why nothing more can be expected of the other side; empty while it lives."""
        self.truncated = False
        """The other side's pidfd was lost: this process could have no more descriptors."""
        self.closed = False
        """The other side closed in good order."""

    @property
    def name(self) -> str:
        """The other side, for messages."""
        return f"{self._who} (pid {self.pid})" if self.pid else self._who

    @property
    def stopped(self) -> bool:
        """The other side is there, but does not run: someone has stopped it (state T)."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in "Tt"

    @property
    def fds(self) -> Sequence[int]:
        """What to watch: the socket, and the other side's pidfd once it is known."""
        return [fd for fd in (self._sock.fileno(), self._pidfd) if fd >= 0] if not self.over else ()

    def greet(self) -> None:
        """Tell the other side who we are."""
        pidfd = os.pidfd_open(os.getpid())
        try:
            with contextlib.suppress(OSError):  # it is gone
                socket.send_fds(self._sock, [_HELLO + _PID.pack(os.getpid())], [pidfd])
        finally:
            os.close(pidfd)

    def look(self, ready: Sequence[int]) -> bool:
        """Take what the other side has said; True if that changed anything. ``ready``: descriptors that woke."""
        if self.over:
            return False
        before = self.pid, self.over
        self._receive()
        if not self.over and self._pidfd >= 0 and self._pidfd in ready:
            self.over = f"{self.name} has died"
        return before != (self.pid, self.over)

    def _receive(self) -> None:
        while not self.over:
            try:
                data, fds, flags, _ = socket.recv_fds(self._sock, 1 + _PID.size, 1)
                self.truncated |= bool(flags & socket.MSG_CTRUNC)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # It closed without having read all that we said. Told once, before what it said last.
                continue
            except OSError:
                data, fds = b"", []
            if data[:1] == _HELLO and fds and len(data) == 1 + _PID.size:
                self.pid = _PID.unpack_from(data, 1)[0]
                self._pidfd = fds[0]
                continue
            for fd in fds:
                os.close(fd)
            self.closed = data[:1] == _CLOSED
            self.over = f"{self.name} has closed its end" if self.closed else f"{self.name} is gone"

    def close(self) -> None:
        """Say so (unless this is a forked copy) and let go. Idempotent."""
        if self._sock.fileno() >= 0 and os.getpid() == self._maker:
            with contextlib.suppress(OSError):
                self._sock.send(_CLOSED, socket.MSG_NOSIGNAL)
        self._sock.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def link_pair(reader: str) -> tuple[Link, socket.socket]:
    """The writer's end, and what the reader makes its own of (:func:`attach_link`). ``reader``: its name."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = Link(ours, reader)
    try:
        link.greet()
    except BaseException:
        link.close()
        theirs.close()
        raise
    return link, theirs


def attach_link(fd: int, writer: str) -> Link:
    """The reader's end; takes over the descriptor. ``writer``: the other side's name.

    TransportError if somebody else has attached here before, OSError if there are no descriptors left.
    """
    try:
        sock = socket.socket(fileno=fd)
    except BaseException:
        os.close(fd)
        raise
    link = Link(sock, writer)
    link.look(())
    if not link.pid:
        sock.close()
        if link.truncated:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        raise TransportError(f"this handle for a reader of {writer} is in use already: each goes to one reader")
    try:
        link.greet()
    except BaseException:
        link.close()
        raise
    return link
