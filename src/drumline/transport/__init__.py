"""Bytes between the processes of one machine: shared memory, doorbells, waiters, rings, queues, codecs.

From below: :mod:`futex`, :mod:`fence`, :mod:`memory` (memfd), :mod:`doorbell`, :mod:`spin` (pure), :mod:`waiter`,
:mod:`arena` (large buffers), :mod:`records` and :mod:`ring` (no waiting), :mod:`broadcast` (ring, arena and doorbells),
:mod:`deaths` (peers that are gone), :mod:`codec` (objects to bytes), :mod:`frames` (messages over a socketpair).
"""

from __future__ import annotations

from drumline.transport.arena import ArenaLayout, ArenaReader, ArenaWriter
from drumline.transport.broadcast import BroadcastQueue, QueueWriter, create_arena
from drumline.transport.codec import CodecRegistry
from drumline.transport.deaths import DeathWatch
from drumline.transport.doorbell import DOORBELL_BYTES, OWNER_RINGER, Doorbell
from drumline.transport.memory import SharedMemory, memfd
from drumline.transport.ring import Message, Part, RingLayout, RingReader, RingWriter, ring_bytes
from drumline.transport.waiter import Waiter, deadline_after

__all__ = [
    "ArenaLayout",
    "ArenaReader",
    "ArenaWriter",
    "DOORBELL_BYTES",
    "OWNER_RINGER",
    "BroadcastQueue",
    "CodecRegistry",
    "DeathWatch",
    "Doorbell",
    "Message",
    "Part",
    "QueueWriter",
    "RingLayout",
    "RingReader",
    "RingWriter",
    "SharedMemory",
    "Waiter",
    "create_arena",
    "deadline_after",
    "memfd",
    "ring_bytes",
]
