"""What a reader of a message queue needs, as something that can be sent to its process."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from multiprocessing import context, reduction
from typing import Any

import msgspec

from drumline.errors import ChannelClosedError, TransportError
from drumline.transport.remote_options import RemoteHandle

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 1 << 16
_MAX_FDS = 8


class HandleData(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a handle that is bytes."""

    queue: str
    index: int
    writer: str
    remote: RemoteHandle | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(HandleData)


class QueueHandle:
    """One reader's end of a :class:`~drumline.transport.queue.MessageQueue`, before it is opened.

    It goes to exactly one process, in one of these ways:

    * an argument of ``multiprocessing.Process`` (any start method);
    * :meth:`send` and :meth:`receive` over a unix socket (descriptors go by SCM_RIGHTS);
    * :meth:`to_bytes` and :attr:`fds` for who passes descriptors in another way, :meth:`from_bytes` at the other end;
    * for a remote reader there are no descriptors: the bytes are enough. They hold its secret key, so they must go
      where nobody else can read them.
    """

    def __init__(self, data: HandleData, fds: Sequence[int], *, owned: bool) -> None:
        self._data = data
        self._fds = tuple(fds)
        self._owned = owned

    @property
    def index(self) -> int:
        """Which reader of its kind (local, remote), from 0."""
        return self._data.index

    @property
    def is_remote(self) -> bool:
        """It connects over TCP; otherwise it shares memory with the writer."""
        return self._data.remote is not None

    @property
    def data(self) -> HandleData:
        """What :meth:`to_bytes` encodes."""
        return self._data

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors that must reach the reader's process, in this order. They belong to whoever made the handle."""
        return self._fds

    def to_bytes(self) -> bytes:
        """The rest, in msgpack."""
        return _encoder.encode(self._data)

    @classmethod
    def from_bytes(cls, data: bytes, fds: Sequence[int] = ()) -> QueueHandle:
        """The handle in the reader's process, which now owns ``fds``. msgspec.DecodeError if it is none."""
        return cls(_decoder.decode(data), fds, owned=True)

    def send(self, sock: socket.socket) -> None:
        """Send over a connected unix stream socket."""
        data = self.to_bytes()
        socket.send_fds(sock, [_LENGTH.pack(len(data)) + data], self._fds)

    @classmethod
    def receive(cls, sock: socket.socket) -> QueueHandle:
        """What a peer sent with :meth:`send`, and nothing of what it sends after that. Waits as long as ``sock`` does.

        ChannelClosedError if the peer is gone, TransportError if it sent something else.
        """
        head, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, _MAX_FDS)
        try:
            (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size, head))
            if length > _MAX_BYTES:
                raise TransportError(f"no queue handle: {length} bytes")
            return cls.from_bytes(_exactly(sock, length), fds)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def take(self) -> list[int]:
        """The descriptors, for the one who opens the queue and then owns them. Once only."""
        fds = [fd if self._owned else os.dup(fd) for fd in self._fds]
        self._fds, self._owned = (), False
        return fds

    def close(self) -> None:
        """Let go of it unopened: of the descriptors that it owns. Idempotent."""
        if self._owned:
            for fd in self.take():
                os.close(fd)

    def __reduce__(self) -> Any:
        if self._fds and context.get_spawning_popen() is None:
            raise TypeError(
                "the handle of a local reader holds descriptors, which go to another process as arguments of a "
                "multiprocessing.Process, or over a unix socket (QueueHandle.send)"
            )
        return _rebuild, (self.to_bytes(), [reduction.DupFd(fd) for fd in self._fds])

    def __repr__(self) -> str:
        kind = "remote" if self.is_remote else "local"
        return f"QueueHandle({self._data.queue!r}, {kind} reader {self.index})"


def _rebuild(data: bytes, fds: Sequence[Any]) -> QueueHandle:
    return QueueHandle.from_bytes(data, [fd.detach() for fd in fds])


def _exactly(sock: socket.socket, length: int, data: bytes = b"") -> bytes:
    while len(data) < length:
        more = sock.recv(length - len(data))
        if not more:
            raise ChannelClosedError("the other side is gone before the whole handle came")
        data += more
    return data
