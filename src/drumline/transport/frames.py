"""Whole messages over a connected stream socket that blocks nobody: one end of a socketpair.

A frame is the length of the message (little-endian uint64) and the message. Each end may be sent on by one thread at a
time and received on by one at a time; sending and receiving need no lock between them. What the kernel does not take is
kept and goes out with :meth:`Frames.flush`: watch :attr:`Frames.fd` for room while :attr:`Frames.waiting`. The
descriptor is an ordinary one, readable as long as there is something to read.

A peer that is gone is no error here: what is sent then goes nowhere, and :attr:`Frames.eof` tells once everything that
it said before has been received. Whoever owns the peer learns of its death, and of the reason, by other ways.

This took the place of ZMQ between two processes, where two threads hand each message on: with one stream, a token cost
each of them two switches of threads more.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from drumline.errors import TransportError

_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 16
_LONGEST = 1 << 40
"""Bytes; a length beyond is none."""
_TURNS = 64
"""Chunks that one call receives at most: whoever reads has other things to do, too."""

T = TypeVar("T")


class Frames:
    """See the module's text. Takes over the socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._out: deque[bytes | memoryview] = deque()
        self._chunk = bytearray(_CHUNK)
        self._view = memoryview(self._chunk)
        self._rest = bytearray()
        """Received, and not a whole frame yet."""
        self._gone = False
        self.eof = False
        """The peer is gone, and all that it said was received: watching :attr:`fd` further is in vain."""

    @property
    def fd(self) -> int:
        """Descriptor; -1 once closed."""
        return self._sock.fileno()

    @property
    def waiting(self) -> bool:
        """Something was not taken by the kernel yet."""
        return bool(self._out)

    def send(self, message: bytes) -> bool:
        """Send a message, or keep what of it cannot be sent now. False: something is kept."""
        self._out.append(_LENGTH.pack(len(message)) + message)
        if len(self._out) == 1:
            self.flush()
        return not self._out

    def flush(self) -> None:
        """Send what was kept, as far as the kernel takes it."""
        out = self._out
        while out:
            frame = out[0]
            try:
                sent = len(frame) if self._gone else self._sock.send(frame, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self._gone = True
                continue
            if sent < len(frame):
                out[0] = memoryview(frame)[sent:]
            else:
                out.popleft()

    def receive(self, decode: Callable[[bytes | memoryview], T]) -> list[T]:
        """What has come, without waiting. ``decode`` gets a message, whose memory is its own for the call only.

        TransportError if what has come is no frame: somebody else has written to the descriptor.
        """
        found: list[T] = []
        for _ in range(_TURNS):
            if self.eof:
                break
            try:
                count = self._sock.recv_into(self._chunk)
            except BlockingIOError:
                break
            except OSError:
                count = 0
            if not count:
                self.eof = True
            elif self._rest:
                self._rest += self._view[:count]
                del self._rest[: self._split(bytes(self._rest) if self._whole() else b"", decode, found)]
            else:
                used = self._split(self._view[:count], decode, found)
                self._rest += self._view[used:count]
            if count < _CHUNK:
                break
        return found

    def _whole(self) -> bool:
        """The rest begins with a whole frame: only then it is copied, so that a long one is copied once."""
        size = _LENGTH.size
        return len(self._rest) >= size and len(self._rest) >= size + _length(self._rest, 0)

    @staticmethod
    def _split(data: bytes | memoryview, decode: Callable[[bytes | memoryview], T], found: list[T]) -> int:
        """Decode the whole frames in ``data``; their bytes."""
        at, size = 0, _LENGTH.size
        while len(data) - at >= size:
            end = at + size + _length(data, at)
            if end > len(data):
                break
            found.append(decode(data[at + size : end]))
            at = end
        return at

    def close(self) -> None:
        """Close; what waits is lost. Idempotent."""
        self._out.clear()
        self._sock.close()


def _length(data: bytes | bytearray | memoryview, at: int) -> int:
    length: int = _LENGTH.unpack_from(data, at)[0]
    if length > _LONGEST:
        raise TransportError(f"no message has {length} bytes: something else was written to its descriptor")
    return length
