"""The front end's side of the channel to the engine core: the socket, and what both clients do with it.

A socketpair is made before the engine core exists, which is given its end (``door``): nobody else can connect.
Requests wait here as long as need be (the front end's own memory); outputs wait in the socket until it is full, from
which on the engine core merges them (``engine.channel``), so a front end that does not read costs nobody memory.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import msgspec

from drumline.engine.channel import merge
from drumline.engine.protocol import Abort, EngineOutputs, EngineRequest, RequestOutput, UtilityCall, UtilityResult
from drumline.errors import RemoteCallError
from drumline.transport.frames import Frames


class FrontChannel:
    """One end of the connection. Not thread-safe, but it may be used by one thread after another."""

    def __init__(self) -> None:
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._frames = Frames(mine)
        self.door = other.detach()
        """Descriptor for the engine core (``CoreChannel``); -1 once it was given away."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decode = msgspec.msgpack.Decoder(EngineOutputs | UtilityResult).decode

    def close_door(self) -> None:
        """The engine core has a copy of ``door``, or it is on its way. Idempotent."""
        door, self.door = self.door, -1
        if door >= 0:
            os.close(door)

    @property
    def fd(self) -> int:
        """Readable while there is something to :meth:`receive`; watch it for room, too, while :attr:`waiting`."""
        return self._frames.fd

    @property
    def waiting(self) -> bool:
        """Something could not be sent yet: :meth:`flush` when there is room."""
        return self._frames.waiting

    @property
    def ended(self) -> bool:
        """The engine core is gone, and all that it said was received: do not watch :attr:`fd` any more."""
        return self._frames.eof

    def encode(self, message: EngineRequest | Abort | UtilityCall) -> bytes:
        """What :meth:`send_encoded` takes."""
        return self._encoder.encode(message)

    def send_encoded(self, data: bytes) -> None:
        """Send, or keep it. If the engine core is gone this does nothing: whoever watches it tells everyone."""
        self._frames.send(data)

    def send(self, message: EngineRequest | Abort | UtilityCall) -> None:
        """Both at once."""
        self._frames.send(self._encoder.encode(message))

    def flush(self) -> None:
        """Send what was kept, as far as there is room."""
        self._frames.flush()

    def receive(self) -> list[EngineOutputs | UtilityResult]:
        """What has come, without waiting; there may be more."""
        return self._frames.receive(self._decode)

    def close(self) -> None:
        """Close everything. Idempotent."""
        self.close_door()
        self._frames.close()


class Stream:
    """Outputs of one request that its consumer has not taken. Pure.

    What comes while the consumer is busy is merged into one output, so a slow consumer holds at most its own tokens.
    """

    __slots__ = ("_next_index", "_pending", "finished")

    def __init__(self) -> None:
        self._pending: RequestOutput | None = None
        self._next_index = 0
        self.finished = False
        """Its last output was put in."""

    def put(self, output: RequestOutput) -> None:
        """Add an output; tokens that were there already (an engine that recovered sends them again) are dropped."""
        known = self._next_index - output.first_index
        if known > 0:
            output.token_ids = output.token_ids[known:]
            output.logprobs = output.logprobs[known:]
            output.first_index = self._next_index
        self._next_index = output.first_index + len(output.token_ids)
        if self._pending is None:
            self._pending = output
        else:
            merge(self._pending, output)
        self.finished = self.finished or output.finish_reason is not None

    def end(self, request_id: str, reason: str, message: str = "", stop_reason: int | str | None = None) -> None:
        """Put in a last output of the front end's own making."""
        if not self.finished:
            self.put(
                RequestOutput(
                    request_id=request_id,
                    first_index=self._next_index,
                    token_ids=[],
                    finish_reason=reason,
                    stop_reason=stop_reason,
                    message=message,
                )
            )

    def take(self) -> RequestOutput | None:
        """What is there, or None."""
        output, self._pending = self._pending, None
        return output


def result_value(result: UtilityResult) -> Any:
    """The value of a call; RemoteCallError if it raised."""
    if result.error is not None:
        raise RemoteCallError(result.error)
    return result.value
