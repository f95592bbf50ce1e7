"""The front end's side of the ZMQ channel to the engine core: the socket, and what both clients do with it.

The socket is bound before the engine core exists and has no name in the file system: the core is given a descriptor
that leads to it (``door``). Requests wait in
the socket as long as need be (the front end's own memory); outputs wait there up to a high water mark, from which on
the engine core merges them (``engine.channel``), so a front end that does not read costs nobody memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import zmq

from drumline.engine.channel import HIGH_WATER, merge
from drumline.engine.protocol import Abort, EngineOutputs, EngineRequest, RequestOutput, UtilityCall, UtilityResult
from drumline.errors import RemoteCallError
from drumline.transport.sockets import Peers, bind_nameless


class FrontChannel:
    """One bound DEALER. Not thread-safe, but it may be used by one thread after another."""

    def __init__(self) -> None:
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        self.door = -1
        """Descriptor for the engine core (``CoreChannel``); -1 once it is connected."""
        try:
            self._socket, self.door = bind_nameless(self._context, zmq.DEALER, sndhwm=0, rcvhwm=HIGH_WATER)
            self._peers = Peers(self._socket)
        except BaseException:
            self._context.destroy(linger=0)
            self._close_door()
            raise
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineOutputs | UtilityResult)

    def wait_connected(self, timeout_s: float, alive: Callable[[], None]) -> None:
        """Wait for the engine core's connection; nobody else can connect then. ``alive`` raises if it died."""
        try:
            self._peers.wait(1, time.monotonic() + timeout_s, alive)
        finally:
            self._close_door()

    def _close_door(self) -> None:
        door, self.door = self.door, -1
        if door >= 0:
            os.close(door)

    @property
    def fd(self) -> int:
        """Becomes readable when something *may* have come; after that, and after each send, look with receive."""
        return int(self._socket.FD)

    def send(self, message: EngineRequest | Abort | UtilityCall) -> None:
        """Send. If the engine core is gone this does nothing: whoever watches it tells everyone."""
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            pass

    def has_input(self) -> bool:
        """Something has come. Sending can hide it from whoever waits on ``fd``, so ask this after each send."""
        return bool(int(self._socket.EVENTS) & zmq.POLLIN)

    def receive(self, most: int = 4 * HIGH_WATER) -> Iterator[EngineOutputs | UtilityResult]:
        """What has come, without waiting."""
        for _ in range(most):
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield self._decoder.decode(data)

    def close(self) -> None:
        """Close everything. Idempotent."""
        self._peers.close()
        self._close_door()
        self._context.destroy(linger=0)


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

    def end(self, request_id: str, reason: str) -> None:
        """Put in a last output of the front end's own making."""
        if not self.finished:
            self.put(
                RequestOutput(request_id=request_id, first_index=self._next_index, token_ids=[], finish_reason=reason)
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
