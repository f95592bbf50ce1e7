"""Messages between neighbours of a pipeline whose ranks share a machine: rings of bytes in their world's memory.

Every rank has one ring, which it writes and the next rank of its pipeline group reads; the last one's leads back to the
first. So hidden states go down the pipeline, and sampled tokens go from the last stage to the first::

    rank 0  --ring 0-->  rank 1  --ring 1-->  rank 2  --ring 2-->  rank 0

A message is a header (its length) and its bytes. The writer copies, then moves the word ``sent``; the reader copies,
then moves the word ``taken``: counts of bytes modulo 2^32, each with one writer, each also what the other side sleeps
on. A message that is longer than what is free goes in pieces: the writer waits for room, the reader takes them as they
come. ``send`` returns when all of it is in the ring, so a stage goes on to its next micro-batch while the next stage
is still busy, as long as the ring has room. Messages keep their order. No thread, no listener, nothing that runs when
nothing is sent.

**No cycle can block.** Waiting for a message goes up the pipeline, and the first stage waits for nobody but, over the
last ring, for the tokens of a step that it has passed on long ago. Waiting for room goes down the pipeline, and would
close a cycle if the last stage waited for the first to take tokens, while that one waits for room. So tokens of all
steps that may be in flight must fit into the last ring at once; who uses it checks that (:data:`MAIL_BYTES`).

Deaths, deadlines and signals are those of :mod:`drumline.parallel.meeting`; the deadline is for each wait, so a long
message that gets on is never late. A rank that waits watches the word for a moment only if its last wait was that
short: stages are milliseconds apart.

Rejected: gloo (a listener without authentication, and a thread that wakes a hundred times a second); a slot that is
handed over (the sender would wait for the reader, and micro-batches could not overlap).
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Sequence

import torch

from drumline.errors import ChannelClosedError, CollectiveError, ConfigError
from drumline.parallel.boxes import MAIL_BYTES, MARKS
from drumline.parallel.meeting import RECHECK_S, Members
from drumline.transport.fence import fence

PIECE_BYTES = 256 << 10
"""Of a long message this much is shown at once, so that the reader copies while the writer does."""

_MASK = 0xFFFFFFFF
_ALIGN = 64
_HEADER = struct.Struct("Q56x")  # a whole line, so that what follows is aligned


class Mail:
    """One rank's ring to the next rank of its pipeline group, and the ring from the one before.

    One thread at a time may send, one receive.
    """

    def __init__(self, members: Members, ranks: Sequence[int], timeout_s: float | None = None) -> None:
        timeout_s = members.timeout_s if timeout_s is None else timeout_s
        self._place, self._size = tuple(ranks).index(members.rank), len(ranks)
        self._where = f"of pp group {tuple(ranks)} on rank {members.rank}"
        after, before = ranks[(self._place + 1) % self._size], ranks[self._place - 1]
        self._out = _Writer(members, members.rank, after, timeout_s)
        self._in = _Reader(members, before, before, timeout_s)
        self._header = ctypes.create_string_buffer(_HEADER.size)
        self._header_at = ctypes.addressof(self._header)
        self._open = True

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send a contiguous CPU tensor to the next member. Returns when it may be changed."""
        self._check(dst, self._place + 1, "send", tensor)
        self._send(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        """Receive into a contiguous CPU tensor from the member before. CollectiveError if another length comes."""
        self._check(src, self._place - 1, "recv", tensor)
        length, expected = self._length(), tensor.numel() * tensor.element_size()
        if length != expected:
            raise CollectiveError(f"recv {self._where}: {expected} bytes are expected, but a message of {length} came")
        self._in.read(tensor.data_ptr(), length, self._where)
        self._in.finish()

    def send_bytes(self, data: bytes, dst: int) -> None:
        """Send bytes to the next member."""
        self._check(dst, self._place + 1, "send")
        self._send(ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0, len(data))

    def recv_bytes(self, src: int) -> bytes:
        """The next message from the member before."""
        self._check(src, self._place - 1, "recv")
        length = self._length()
        data = ctypes.create_string_buffer(length)
        self._in.read(ctypes.addressof(data), length, self._where)
        self._in.finish()
        return data.raw

    def close(self) -> None:
        """Wake whoever waits for this rank, who has been marked as gone."""
        if self._open:
            self._open = False
            self._out.wake()
            self._in.wake()

    def _send(self, address: int, length: int) -> None:
        _HEADER.pack_into(self._header, 0, length)
        self._out.write(self._header_at, _HEADER.size, self._where)
        self._out.write(address, length, self._where)
        self._out.finish()

    def _length(self) -> int:
        self._in.read(self._header_at, _HEADER.size, self._where)
        length: int = _HEADER.unpack_from(self._header)[0]
        return length

    def _check(self, peer: int, neighbour: int, operation: str, tensor: torch.Tensor | None = None) -> None:
        if not self._open:
            raise ChannelClosedError(f"{operation} {self._where}: it is closed")
        if peer != neighbour % self._size:
            raise ConfigError(f"{operation} {self._where}: a stage sends to the next one and receives from the last")
        if tensor is not None and not (tensor.is_contiguous() and tensor.is_cpu):
            raise ValueError(f"{operation} {self._where}: the tensor must be contiguous and on the CPU")


class _End:
    """One side of a ring: its own word, which only it writes, and the other side's."""

    def __init__(self, members: Members, ring: int, own: int, other: int, peer: int, timeout_s: float) -> None:
        self._members = members
        self._timeout_s = timeout_s
        self._peer = peer
        self._words = members.words
        self._own, self._other = own // 4, other // 4
        self._ring = members.address + members.boxes.mail_at(ring)
        self._count = self._words[self._own]
        """Bytes so far, shown or not."""
        self._wake_arguments = members.wake_arguments(self._own)
        self._quick = False

    def finish(self) -> None:
        """Go to the next line, where the next message begins, and show how far this side is."""
        self._count += -self._count % _ALIGN
        self._show()

    def wake(self) -> None:
        """Make the other side look again."""
        self._members.wake(self._wake_arguments)

    def _show(self) -> None:
        """What has been copied so far is the other side's."""
        fence()
        self._words[self._own] = self._count & _MASK
        self.wake()

    def _ahead(self) -> int:
        """How many bytes this side may copy now."""
        raise NotImplementedError

    def _spans(self, length: int, operation: str, where: str) -> int:
        """Bytes that can be copied at once, at least 1: up to ``length``, a piece, and the end of the ring."""
        ahead = self._ahead()
        if not ahead:
            if self._words[self._own] != self._count & _MASK:
                self._show()
            ahead = self._wait(operation, where)
        return min(length, ahead, PIECE_BYTES, MAIL_BYTES - self._count % MAIL_BYTES)

    def _wait(self, operation: str, where: str) -> int:
        """Until there is something for this side. CollectiveError if the other one is gone or does nothing for long."""
        started, members = time.monotonic(), self._members
        if self._quick and members.spin_ns:
            until = time.perf_counter_ns() + members.spin_ns
            while time.perf_counter_ns() < until:
                if ahead := self._ahead():
                    fence()
                    return ahead
        self._words[self._own + 1] = MARKS[operation]
        try:
            return self._wait_asleep(started, operation, where)
        finally:
            self._words[self._own + 1] = 0

    def _wait_asleep(self, started: float, operation: str, where: str) -> int:
        members = self._members
        deadline, overslept = started + self._timeout_s, False
        while True:
            gone = members.gone(self._peer, ask=overslept)
            fence()  # who is gone has told before how far it came
            value = self._words[self._other]
            if ahead := self._ahead():
                fence()
                self._quick = (time.monotonic() - started) * 1e9 < 2 * members.spin_ns
                return ahead
            left = deadline - time.monotonic()
            if gone or left <= 0:
                what = gone or f"gave no sign within {self._timeout_s:g} s"
                raise CollectiveError(f"{operation} {where}: rank {self._peer} {what}")
            overslept = members.sleep(self._other, value, min(left, RECHECK_S))


class _Writer(_End):
    """Writes the ring of ``ring``, which ``peer`` reads."""

    def __init__(self, members: Members, ring: int, peer: int, timeout_s: float) -> None:
        boxes = members.boxes
        super().__init__(members, ring, boxes.sent_at(ring), boxes.taken_at(ring), peer, timeout_s)

    def write(self, address: int, length: int, where: str) -> None:
        """Copy bytes into the ring; they are shown at the end of a piece, of the room, or by :meth:`finish`."""
        done = 0
        while done < length:
            span = self._spans(length - done, "send", where)
            ctypes.memmove(self._ring + self._count % MAIL_BYTES, address + done, span)
            self._count += span
            done += span
            if span == PIECE_BYTES and done < length:  # the end is shown with the step to the next line only
                self._show()

    def _ahead(self) -> int:
        # To the next line is gone without asking for room, so up to a line more than the ring may be on the way.
        return max(0, MAIL_BYTES - (self._count - self._words[self._other] & _MASK))


class _Reader(_End):
    """Reads the ring of ``ring``, which ``peer`` writes."""

    def __init__(self, members: Members, ring: int, peer: int, timeout_s: float) -> None:
        boxes = members.boxes
        super().__init__(members, ring, boxes.taken_at(ring), boxes.sent_at(ring), peer, timeout_s)

    def read(self, address: int, length: int, where: str) -> None:
        """Copy bytes out of the ring; their room is given back at the end of a piece, or by :meth:`finish`."""
        done = 0
        while done < length:
            span = self._spans(length - done, "recv", where)
            fence()
            ctypes.memmove(address + done, self._ring + self._count % MAIL_BYTES, span)
            self._count += span
            done += span
            if span == PIECE_BYTES and done < length:  # the end is shown with the step to the next line only
                self._show()

    def _ahead(self) -> int:
        return self._words[self._other] - self._count & _MASK
