"""Bytes and objects between processes, of one machine and of several.

Public: :class:`MessageQueue` and what belongs to it (docs/message-queue.md).

From below: :mod:`futex`, :mod:`fence`, :mod:`memory` (memfd), :mod:`doorbell`, :mod:`spin` (pure), :mod:`waiter`,
:mod:`arena` (large buffers), :mod:`records` and :mod:`ring` (no waiting), :mod:`broadcast` (ring, arena and doorbells),
:mod:`codec` (objects to bytes), :mod:`frames` (messages over a socketpair).
Between machines: :mod:`addresses`, :mod:`gate`, :mod:`remote_options` and :mod:`remote_wire` (pure), :mod:`remote`.
The queue of objects: :mod:`service` (a thread on descriptors), :mod:`links` and :mod:`deaths` (who lives),
:mod:`handles`, :mod:`queue`; its names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from drumline.transport.arena import ArenaLayout, ArenaReader, ArenaWriter
from drumline.transport.broadcast import BroadcastQueue, QueueWriter, create_arena
from drumline.transport.codec import CodecRegistry
from drumline.transport.deaths import DeathWatch
from drumline.transport.doorbell import DOORBELL_BYTES, OWNER_RINGER, Doorbell
from drumline.transport.memory import SharedMemory, memfd
from drumline.transport.ring import Message, Part, RingLayout, RingReader, RingWriter, ring_bytes
from drumline.transport.waiter import Waiter, deadline_after

if TYPE_CHECKING:
    from drumline.transport.deaths import DeathSource, ProcessDeath
    from drumline.transport.handles import QueueHandle
    from drumline.transport.queue import MessageQueue, QueueReader
    from drumline.transport.remote_options import RemoteOptions

__all__ = [
    "ArenaLayout",
    "ArenaReader",
    "ArenaWriter",
    "DOORBELL_BYTES",
    "OWNER_RINGER",
    "BroadcastQueue",
    "CodecRegistry",
    "DeathSource",
    "DeathWatch",
    "Doorbell",
    "Message",
    "MessageQueue",
    "Part",
    "ProcessDeath",
    "QueueHandle",
    "QueueReader",
    "QueueWriter",
    "RemoteOptions",
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

_HOMES = {
    "DeathSource": "deaths",
    "MessageQueue": "queue",
    "ProcessDeath": "deaths",
    "QueueHandle": "handles",
    "QueueReader": "queue",
    "RemoteOptions": "remote_options",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
