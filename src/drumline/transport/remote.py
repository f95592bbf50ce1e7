"""The message queue between machines: one writer, readers over ZMQ on TCP, encrypted and authenticated by CURVE.

::

    writer's process                                     reader's process
    try_write, under the lock --> ROUTER --(IO thread)-- TCP --(IO thread)-- DEALER --> poll(), wait(): Inbox
      Outbox keeps a copy
    service thread <-- ROUTER <--------- HELLO, ACK, END_RECEIVED, BYE <------------- release(): ACK
      gate: who may come in                                                           service thread: the connection
      -> bell of the writer's waiter: there is room, or a reader is gone

The one who writes listens, on one address (see gate.py); readers connect. What they say to each other, credit and
retransmission are in remote_wire.py.

**Nothing is lost or reordered** by a connection that breaks: ZMQ connects again by itself, the reader's first frame on
every connection (HELLO) says what it has, the writer goes on there. Frames of the old connection that come late are
recognised by their numbers. A reader is known by its key, a connection by its descriptor, never by what a peer says.

**Death.** A connection that ends makes a peer *away*; one that stays away for ``reconnect_s`` is *gone*: the writer's
calls raise ChannelClosedError from then on, and so do those of a reader whose writer is gone. A connection that is
silent ends after ``heartbeat_s`` and twice that: ZMQ's IO threads send and answer heartbeats, without Python. Closing
is said (END, BYE), so it is known at once. Who has other news of a death (a process that it supervises) has its own
death source.

**Threads.** The application's threads send and receive themselves: a hand-over to another thread costs a wake-up (30
us) and the interpreter's lock, up to 5 ms while the application computes. So a socket is used by two threads, by one at
a time (a lock), and whoever used it takes what has come before it lets go, since ZMQ's descriptor does not wake again
for that. The service threads sleep until a connection comes or ends; the writer's takes what readers say, too, and the
reader's takes its turn twice a second while messages flow, lest a reader that computes for long leave the end of the
queue unanswered.

**What idleness costs**, measured over 20 s with a heartbeat every 5 s, on 2 cores: 1.3 ms of CPU for the writer and
0.8 ms for the reader (every 2 s: 2.0 and 1.6; none: 0.2 and 0.1), since no Python runs. TCP's keepalive would be free
but notices a peer that is stopped only when there is something to send.

Rejected: PUB/SUB and XPUB: they drop. A reader that acknowledges what it received: memory would fill behind a slow one.
ZMQ's own high-water marks as flow control: they count frames, not bytes, and ROUTER drops there. ``copy=False`` in
pyzmq: starts a thread and a context of its own that outlive the queue. Sockets with ``ssl``: pre-shared keys need
Python 3.13, certificates another library.
"""

from __future__ import annotations

from drumline.transport.remote_reader import RemoteMessage, RemoteReader
from drumline.transport.remote_writer import RemoteWriter

__all__ = ["RemoteMessage", "RemoteReader", "RemoteWriter"]
