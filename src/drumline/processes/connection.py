"""One stream connection between two processes: framed msgspec messages with descriptors.

A frame is a header (length of the body, number of descriptors; two little-endian uint32) and the body in msgpack.
Descriptors travel by SCM_RIGHTS with the first byte of their frame. The kernel never gives descriptors later than the
bytes that they were sent with, so when a frame is complete its descriptors are there.

Any thread may send; one thread receives. The socket itself blocks for nobody: sends that do not fit stay queued (whole
frames, so the stream is never torn) and go out with the next send or :meth:`Connection.flush`.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import resource
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from drumline.errors import ChannelClosedError
from drumline.processes.messages import encode

_HEADER = struct.Struct("<II")
_MAX_BODY = 1 << 30
_MAX_FDS = 250
_CHUNK = 1 << 18

In = TypeVar("In")


class Frame(Generic[In]):
    """A message and the descriptors that came with it. Whoever takes the message owns them."""

    __slots__ = ("fds", "message")

    def __init__(self, message: In, fds: list[int]) -> None:
        self.message = message
        self.fds = fds


class Connection(Generic[In]):
    """A connected unix stream socket that speaks frames. ``incoming`` is the union of types that may arrive."""

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self._buffer = bytearray()
        self._fds: deque[int] = deque()
        self._out: deque[tuple[memoryview, list[int]]] = deque()
        self._lock = threading.Lock()
        self.eof = False
        """The other side is gone: nothing more will arrive."""

    @classmethod
    def from_fd(cls, fd: int, incoming: Any) -> Connection[In]:
        """Take over a descriptor."""
        return cls(socket.socket(fileno=fd), incoming)

    @property
    def fd(self) -> int:
        """Descriptor, -1 once closed."""
        return self._sock.fileno()

    @property
    def pending(self) -> bool:
        """Is there something queued that did not fit yet?"""
        return bool(self._out)

    def send(self, message: Any, fds: Sequence[int] = (), timeout_s: float = 5.0) -> None:
        """Queue one frame and try to send everything that is queued.

        ``fds`` are duplicated, the caller keeps its own. ChannelClosedError if the other side is gone; TimeoutError if
        it did not take everything in time (it stays queued); OSError if this process may open no more descriptors, and
        nothing is queued.
        """
        if len(fds) > _MAX_FDS:
            raise ValueError(f"at most {_MAX_FDS} descriptors fit in one message, got {len(fds)}")
        body = encode(message)
        frame = memoryview(_HEADER.pack(len(body), len(fds)) + body)
        with self._lock:
            copies: list[int] = []
            try:
                for fd in fds:
                    copies.append(os.dup(fd))
            except OSError:
                _close_all(copies)
                raise
            self._out.append((frame, copies))
            self._flush(time.monotonic() + timeout_s)

    def flush(self) -> None:
        """Send what is queued as far as it fits now. ChannelClosedError if the other side is gone."""
        with self._lock, contextlib.suppress(TimeoutError):
            self._flush(0.0)

    def _flush(self, deadline: float) -> None:
        while self._out:
            frame, fds = self._out.popleft()
            try:
                sent = self._send_some(frame, fds)
            except BlockingIOError:
                self._out.appendleft((frame, fds))
                self._wait_writable(deadline)
                continue
            except OSError as error:
                _close_all(fds)
                self._drop_queue()
                raise ChannelClosedError(f"the other side of a control connection is gone ({error})") from error
            _close_all(fds)
            if sent < len(frame):
                self._out.appendleft((frame[sent:], []))

    def _send_some(self, frame: memoryview, fds: list[int]) -> int:
        if not fds:
            return self._sock.send(frame, socket.MSG_NOSIGNAL)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        return self._sock.sendmsg([frame], rights, socket.MSG_NOSIGNAL)

    def _wait_writable(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other side of a control connection does not read")
        poller = select.poll()
        poller.register(self._sock.fileno(), select.POLLOUT)
        poller.poll(min(left, 5.0) * 1000)

    def _drop_queue(self) -> None:
        while self._out:
            _close_all(self._out.popleft()[1])

    def receive(self) -> list[Frame[In]]:
        """Everything that has arrived; never blocks. Sets :attr:`eof` at the end of the stream.

        :raises ChannelClosedError: a frame that none of ours can be.
        :raises OSError: descriptors that came with it are lost, since this process has as many open as it may.
        """
        while not self.eof:
            try:
                data, ancillary, flags, _address = self._sock.recvmsg(
                    _CHUNK, socket.CMSG_SPACE(253 * 4), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                break
            except OSError:
                self.eof = True
                break
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    self._fds.extend(array.array("i", payload[: len(payload) // 4 * 4]))
            if flags & socket.MSG_CTRUNC:
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                text = f"no room for descriptors that were sent: raise the limit of open files (ulimit -n), now {limit}"
                raise OSError(errno.EMFILE, text)
            if not data:
                self.eof = True
            self._buffer += data
        return self._parse()

    def _parse(self) -> list[Frame[In]]:
        frames: list[Frame[In]] = []
        at = 0
        while len(self._buffer) - at >= _HEADER.size:
            length, n_fds = _HEADER.unpack_from(self._buffer, at)
            if length > _MAX_BODY or n_fds > _MAX_FDS:
                raise ChannelClosedError(f"broken frame on a control connection ({length} bytes, {n_fds} descriptors)")
            end = at + _HEADER.size + length
            if end > len(self._buffer):
                break
            message = self._decoder.decode(memoryview(self._buffer)[at + _HEADER.size : end])
            frames.append(Frame(message, [self._fds.popleft() for _ in range(n_fds)]))
            at = end
        if at:
            del self._buffer[:at]
        return frames

    def receive_wait(self, timeout_s: float) -> list[Frame[In]]:
        """As receive, but waits until something arrives, the stream ends, or the time is over."""
        deadline = time.monotonic() + timeout_s
        while True:
            frames = self.receive()
            left = deadline - time.monotonic()
            if frames or self.eof or left <= 0:
                return frames
            poller = select.poll()
            poller.register(self._sock.fileno(), select.POLLIN)
            poller.poll(left * 1000)

    def abandon(self) -> None:
        """Forget the descriptor without closing it (in a forked child, where its number may mean something else)."""
        if self._sock.fileno() >= 0:
            self._sock.detach()
        self._fds.clear()
        self._out.clear()

    def close(self) -> None:
        """Close. Idempotent; safe while another thread sends."""
        with self._lock:
            self._drop_queue()
            _close_all(self._fds)
            self._fds.clear()
            self._sock.close()


def _close_all(fds: Sequence[int] | deque[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected stream sockets, closed on exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
