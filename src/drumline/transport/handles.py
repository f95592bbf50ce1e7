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
_LOCAL_FDS = (4, 5)
"""Descriptors of a local reader, without and with an arena."""


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

    def __init__(self, data: HandleData, fds: Sequence[int], *, owned: bool, ended: Sequence[bool] = (False,)) -> None:
        """``ended``: its first item says whether the queue was closed in this process, to which ``fds`` belong then."""
        self._data = data
        self._fds = tuple(fds)
        self._owned = owned
        self._used = False
        self._ended = ended

    def check(self) -> None:
        """ChannelClosedError if the queue was closed in this process: its descriptors may be another's by now."""
        if self._ended[0]:
            raise ChannelClosedError(f"{self._data.queue}: this queue was closed")

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
        """Descriptors that must reach the reader's process, in this order. They belong to whoever made the handle.

        ChannelClosedError once the queue was closed in this process.
        """
        self.check()
        return self._fds

    def to_bytes(self) -> bytes:
        """The rest, in msgpack."""
        return _encoder.encode(self._data)

    @classmethod
    def from_bytes(cls, data: bytes, fds: Sequence[int] = ()) -> QueueHandle:
        """The handle in the reader's process, which now owns ``fds``. msgspec.DecodeError if it is none."""
        return cls(_decoder.decode(data), fds, owned=True)

    def send(self, sock: socket.socket) -> None:
        """Send over a connected unix stream socket. ChannelClosedError once the queue was closed in this process."""
        data = self.to_bytes()
        fds = self._duplicates()
        try:
            socket.send_fds(sock, [_LENGTH.pack(len(data)) + data], fds)
        finally:
            for fd in fds:
                os.close(fd)

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
        """The descriptors of a local reader, for the one who opens the queue and then owns them. Once only.

        ChannelClosedError after that, and if the queue was closed in this process. ValueError if some are missing.
        """
        if self._used:
            raise ChannelClosedError(f"{self!r} was used: each opens one reader, once")
        if len(self._fds) not in _LOCAL_FDS:
            raise ValueError(
                f"{self!r} has {len(self._fds)} descriptors, and opens with {_LOCAL_FDS[0]} or {_LOCAL_FDS[1]}: those "
                "of QueueHandle.fds go with the bytes, as from_bytes(data, fds)"
            )
        fds = list(self._fds) if self._owned else self._duplicates()
        self._fds, self._owned, self._used = (), False, True
        return fds

    def _duplicates(self) -> list[int]:
        """New descriptors of the same files, none of another queue."""
        self.check()
        found: list[int] = []
        try:
            for fd in self._fds:
                found.append(os.dup(fd))
            self.check()  # closed meanwhile, by another thread
        except BaseException as exc:
            for fd in found:
                os.close(fd)
            if isinstance(exc, OSError):
                self.check()
            raise
        return found

    def close(self) -> None:
        """Let go of it unopened: of the descriptors that it owns. Idempotent."""
        if self._owned:
            fds, self._fds, self._owned, self._used = self._fds, (), False, True
            for fd in fds:
                os.close(fd)

    def __reduce__(self) -> Any:
        if self._fds and context.get_spawning_popen() is None:
            raise TypeError(
                "the handle of a local reader holds descriptors, which go to another process as arguments of a "
                "multiprocessing.Process, or over a unix socket (QueueHandle.send)"
            )
        return _rebuild, (self.to_bytes(), [reduction.DupFd(fd) for fd in self.fds])

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
