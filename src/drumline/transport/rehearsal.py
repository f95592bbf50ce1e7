"""The way of a message, run once over memory of its own just before one is due, so that it is warm when that comes.

10 ms after the last message the code that handles one is in no cache that is near, and neither is what it looks at: to
read and answer a small message takes some ten times what it takes back to back, and nearly all of that is waiting for
memory. A reader that watches for a message which is about to come (:mod:`spin`) has the time to run that code before.
What is run is the same code with a sample of what is sent, so nothing of anybody's is decoded twice.

Rejected: to decode the last message again (unpickling runs code of whoever sent it, who may count how often).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from drumline.transport.broadcast import QueueWriter
from drumline.transport.codec import CodecRegistry
from drumline.transport.records import RingLayout
from drumline.transport.ring import RingReader, RingWriter

SAMPLE = {"step": 1, "ids": ["request-0"], "blocks": [[1, 300, 70000]], "more": (None, True, 1.5)}
"""An object of the kind that is sent."""
_SLOT_BYTES, _SLOTS = 2048, 2

Decode = Callable[[int, memoryview, Sequence[memoryview]], Any]


class Rehearsal:
    """Call it: one small message is encoded, written, read and decoded. For one thread at a time.

    ``encode`` gives a kind and the bytes of a sample (at most 2,016), ``decode`` is what the real reader does.
    """

    def __init__(self, encode: Callable[[], tuple[int, bytes]], decode: Decode) -> None:
        layout = RingLayout(_SLOT_BYTES, _SLOTS, 1)
        buf = memoryview(bytearray(layout.total_bytes))
        layout.init(buf)
        self._encode = encode
        self._decode = decode
        self._writer = QueueWriter(RingWriter(buf), ())
        self._reader = RingReader(buf)

    @classmethod
    def of_objects(cls, codec: CodecRegistry) -> Rehearsal:
        """For queues of any objects."""

        def encode() -> tuple[int, bytes]:
            kind, parts, _ = codec.encode(SAMPLE)
            return kind, b"".join(parts)

        return cls(encode, codec.decode)

    def __call__(self) -> None:
        """Run it once."""
        kind, data = self._encode()
        self._writer.write_small(data, kind)
        self._reader.receive(self._decode)
