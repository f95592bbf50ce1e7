"""The message queue: any Python object from one writer to n readers on this machine and m on others. Public.

::

    enqueue(obj) -> codec, once -+-> ring and arena in shared memory -> local readers: dequeue() -> obj
                                 +-> CURVE over TCP ------------------> remote readers: dequeue() -> obj

Every reader gets every message, in order. A writer for whom there is no room waits (nothing is dropped), readers wait
for messages; both sleep without any cost, end with a deadline if they are given one, and at once when the other side
dies or closes. What is where: ring.py, arena.py and broadcast.py (memory), remote.py (TCP), codec.py (objects),
links.py and deaths.py (who lives), handles.py (what is sent to a reader's process).

Locks. ``_turn`` makes the whole of an enqueue one act, since the ring has one writer and a message goes to all readers
or to none. The service thread never takes it: it notes who is gone and rings. It is let go of whatever a signal handler
raises (KeyboardInterrupt), and wherever: Python runs handlers after calls, so the instant after ``acquire`` is one of
those places, and only a lock that knows its owner can be released there without being told.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from time import monotonic
from typing import TYPE_CHECKING, Any

from drumline.errors import (
    ChannelClosedError,
    ConfigError,
    QueueTimeoutError,
    RPCTimeoutError,
    TransportError,
    is_unicode,
    shown,
)
from drumline.transport.broadcast import BroadcastQueue
from drumline.transport.codec import CodecRegistry, Encoded
from drumline.transport.deaths import DeathSource
from drumline.transport.doorbell import Doorbell
from drumline.transport.handles import HandleData, QueueHandle
from drumline.transport.links import Link, attach_link, link_pair
from drumline.transport.native import COUNT, LATE, Receive
from drumline.transport.rehearsal import Rehearsal
from drumline.transport.remote_options import RemoteOptions, whole_number
from drumline.transport.service import Service
from drumline.transport.waiter import Waiter, deadline_after

if TYPE_CHECKING:
    from drumline.transport.remote import RemoteReader, RemoteWriter  # at run time only who uses them imports ZMQ

SLOT_BYTES = 16384
SLOTS = 64
ARENA_BYTES = 64 << 20
LINGER_S = 5.0
LONG_WAIT_S = 60.0
"""Seconds that a writer waits for room before it says in the log who has not read."""
_WRITER_RINGER = 1
_MOST_BYTES = 1 << 46
"""Of ring and arena; a process of this machine can map little more."""
_MOST_NAME = 200
"""Bytes of a name; the kernel takes 249 with what is put around it."""

log = logging.getLogger(__name__)


Decode = Callable[[int, memoryview, Sequence[memoryview]], Any]


_ends: weakref.WeakSet[MessageQueue | QueueReader] = weakref.WeakSet()
"""Of this process, for who is forked from it."""


def _disown() -> None:
    """In a forked child: what its parent has made is not the child's. Closed for it, which costs no look of its own."""
    for end in list(_ends):
        end._closed = True


os.register_at_fork(after_in_child=_disown)


def _why_closed(end: MessageQueue | QueueReader, kind: str) -> str:
    if os.getpid() == end._maker:
        return f"this {kind} is closed"
    return (
        f"this {kind} is that of process {end._maker}, which made it; a forked child (this one is {os.getpid()}) "
        f"cannot use it: it attaches to a handle"
    )


class _Watch:
    """Asks death sources and links, in a thread of its own that sleeps until there is news."""

    def __init__(
        self, name: str, links: Sequence[Link], deaths: Sequence[DeathSource], ring: Callable[[], None]
    ) -> None:
        self._links = links
        self._deaths = {source.fileno(): source for source in deaths}
        self._ring = ring
        self.over = ""
        """Why the other side cannot be expected any more: the first news of it."""
        fds = [*self._deaths, *(fd for link in links for fd in link.fds)]
        self._service = Service(name, fds, self._serve)
        if fds or links:
            try:
                self._service.start()
            except BaseException:
                self._service.stop()
                raise

    def _serve(self, ready: Sequence[int]) -> None:
        found = ""
        for link in self._links:
            before = link.fds
            changed = link.look(ready)
            found = found or link.over
            if changed:
                for fd in before:
                    self._service.forget(fd)
                for fd in link.fds:
                    self._service.watch(fd)
        for fd in ready:
            source = self._deaths.get(fd)
            if source is not None:
                found = found or source.reason
                self._service.forget(fd)
        if found and not self.over:
            self.over = found
            self._ring()

    def stop(self) -> None:
        self._service.stop()


class _LocalEnd:
    """The writer's half of the part in shared memory."""

    def __init__(self, name: str, n_readers: int, sizes: tuple[int, int, int], largest: int, waiter: Waiter) -> None:
        slot_bytes, slots, arena_bytes = sizes
        names = [f"local reader {i}" for i in range(n_readers)]
        self._waiter = waiter
        self._waiters: list[Waiter] = []
        self._bells: list[Doorbell] = []
        self.links: list[Link] = []
        self._theirs: list[socket.socket] = []
        with ExitStack() as made:  # its callbacks run in the opposite order
            self._queue = BroadcastQueue.create(name, slot_bytes, slots, n_readers, arena_bytes)
            made.callback(self._queue.close)
            for i in range(n_readers):
                reader = Waiter.create(f"{name}-{i}", n_readers + 1)
                made.callback(reader.close)
                self._waiters.append(reader)
                self._bells.append(reader.ringer(_WRITER_RINGER))
                made.callback(self._bells[i].close)
            self._writer = self._queue.writer(self._bells, "slots or slot_bytes", largest, names)
            made.callback(self._writer.close)
            for who in names:
                ours, theirs = link_pair(who)
                made.callback(theirs.close)
                made.callback(ours.close)
                self.links.append(ours)
                self._theirs.append(theirs)
            made.pop_all()
        self._written: deque[tuple[int, float]] = deque(maxlen=slots)
        """What the ring had counted after each message that may be unread, and when."""
        self.small = self._writer.small
        self._state = self._writer.state

    def fds(self, index: int) -> tuple[int, ...]:
        arena = self._queue.arena_fd
        own = (self._queue.fd, self._waiter.fd, self._waiters[index].fd, self._theirs[index].fileno())
        return own if arena < 0 else (*own, arena)

    def write(self, encoded: Encoded, deadline: float | None, alive: Callable[[], None]) -> None:
        kind, parts, buffers = encoded
        self._writer.enqueue(parts, self._waiter, deadline, alive, kind, buffers)
        self._written.append((self._writer.written, monotonic()))

    def write_small(self, data: bytes, kind: int) -> bool:
        """:meth:`write` for at most ``small`` bytes. False if there is no room now."""
        if not self._writer.write_small(data, kind):
            return False
        self._written.append((self._state[COUNT], monotonic()))
        return True

    def laggards(self) -> list[str]:
        now = time.monotonic()
        lines = []
        for link, behind in zip(self.links, self._writer.backlog(), strict=True):
            if behind:
                read = self._writer.written - behind
                unread = [when for count, when in self._written if (count - read - 1) & 0xFFFFFFFF < 2**31]
                since = f" for {now - unread[0]:.1f} s" if unread else ""
                state = " is stopped (state T) and" if link.stopped else ""
                attached = "" if link.pid else " (and has never attached)"
                lines.append(f"{link.name}{state} has not read {len(unread)} message(s){since}{attached}")
        return lines

    def close(self) -> None:
        for link in self.links:
            link.close()
        for theirs in self._theirs:
            theirs.close()
        self._writer.close()
        for bell in self._bells:
            bell.close()
        for waiter in self._waiters:
            waiter.close()
        self._queue.close()


def _check_sizes(
    local_readers: int, remote_readers: int, port: int, slot_bytes: int, slots: int, arena_bytes: int
) -> None:
    """ConfigError if a queue cannot have these."""
    for what, number, least, most in (
        ("local_readers", local_readers, None, None),
        ("remote_readers", remote_readers, None, 65535),
        ("port", port, 0, 65535),
        ("slot_bytes", slot_bytes, None, 1 << 31),
        ("slots", slots, None, 1 << 30),
        ("arena_bytes", arena_bytes, 0, _MOST_BYTES),
    ):
        whole_number(what, number, least, most)
    if slots * slot_bytes > _MOST_BYTES:
        raise ConfigError(f"slots times slot_bytes is at most {_MOST_BYTES}, not {slots} times {slot_bytes}")
    if not 0 <= local_readers <= 254 or remote_readers < 0 or not local_readers + remote_readers:
        raise ConfigError(f"a queue has readers: {local_readers} local (at most 254), {remote_readers} remote")


class MessageQueue:
    """The writing end of a queue, and what makes it: any Python object to every reader.

    ::

        with MessageQueue(local_readers=2) as queue:
            for handle in queue.handles:
                multiprocessing.Process(target=work, args=(handle,)).start()
            queue.enqueue({"step": 1, "tokens": array})

        def work(handle):
            with MessageQueue.attach(handle) as reader:
                obj = reader.dequeue(timeout=10)

    Arrays and tensors arrive read-only, see :mod:`drumline.transport.codec`. Any thread may enqueue. A reader that dies
    or closes its end breaks the queue: every later :meth:`enqueue` raises ChannelClosedError and says who it was.
    """

    def __init__(
        self,
        local_readers: int = 1,
        remote_readers: int = 0,
        *,
        host: str = "",
        port: int = 0,
        slot_bytes: int = SLOT_BYTES,
        slots: int = SLOTS,
        arena_bytes: int = ARENA_BYTES,
        remote: RemoteOptions | None = None,
        codec: CodecRegistry | None = None,
        deaths: Sequence[DeathSource] = (),
        name: str = "queue",
    ) -> None:
        """Make a queue; the readers need not exist yet.

        Args:
            local_readers: readers on this machine (threads or processes), at most 254.
            remote_readers: readers that connect over TCP.
            host: address of this machine to listen on, with remote readers: one that they can reach; never a wildcard.
            port: 0 for any free one.
            slot_bytes: of the ring. A message takes as many slots as it needs.
            slots: of the ring.
            arena_bytes: of the memory for large buffers, which local readers look at where they lie; 0: none, then
                everything goes through the ring. All memory is taken as it is used.
            remote: time limits for remote readers; its ``max_message_bytes`` holds for all readers.
            codec: for types that have a codec of their own; both ends need the same.
            deaths: what else tells that a reader is gone: their processes, for readers that may never attach. Links to
                readers that have attached tell of themselves.
            name: for messages and /proc.

        ConfigError if that cannot work.

        """
        _check_sizes(local_readers, remote_readers, port, slot_bytes, slots, arena_bytes)
        if not isinstance(name, str) or "\0" in name or not is_unicode(name) or len(name.encode()) > _MOST_NAME:
            raise ConfigError(f"name is at most {_MOST_NAME} bytes of text without NUL, not {shown(name)}")
        if remote_readers and not host:
            raise ConfigError("remote readers need host: the address of this machine that they connect to")
        self.name = name
        self._encode = (codec or CodecRegistry()).encode
        self._turn = threading.RLock()  # it knows whose it is, also where a signal handler has raised meanwhile
        self._has_turn: Callable[[], bool] = self._turn._is_owned  # type: ignore[attr-defined]
        self._ended = [False]
        """For handles: the descriptors are not this queue's any more."""
        self._inside = False
        """The thread whose turn it is does something with it."""
        self._maker = os.getpid()
        self._closed = False
        self._begin = 0.0
        self._next_word = 0.0
        self._remote: RemoteWriter | None = None
        self._local: _LocalEnd | None = None
        self._waiter = Waiter.create(f"{name}-writer", local_readers + 1)
        try:
            if local_readers:
                largest = (remote or RemoteOptions()).max_message_bytes
                sizes = (slot_bytes, slots, arena_bytes)
                self._local = _LocalEnd(name, local_readers, sizes, largest, self._waiter)
            if remote_readers:
                from drumline.transport.remote import RemoteWriter

                self._remote = RemoteWriter(host, remote_readers, self._waiter.ring, remote, port)
            links = self._local.links if self._local is not None else []
            self._watch = _Watch(f"{name}-watch", links, deaths, self._waiter.ring)
        except BaseException as exc:
            if self._remote is not None:
                self._remote.close(0.0)
            if self._local is not None:
                self._local.close()
            self._waiter.close()
            if isinstance(exc, OSError) and exc.errno in (errno.ENOMEM, errno.EFBIG, errno.EINVAL):
                raise ConfigError(
                    f"no memory for a ring of {slots * slot_bytes} bytes and an arena of {arena_bytes}: make slots, "
                    f"slot_bytes or arena_bytes smaller ({exc.strerror})"
                ) from None
            if isinstance(exc, ValueError) and not isinstance(exc, ConfigError):
                raise ConfigError(str(exc)) from None
            raise
        _ends.add(self)

    @staticmethod
    def attach(
        handle: QueueHandle, codec: CodecRegistry | None = None, deaths: Sequence[DeathSource] = ()
    ) -> QueueReader:
        """Open a reader's end, in its process; the handle is used up. ``deaths``: what else tells of the writer's."""
        return QueueReader(handle, codec, deaths)

    @property
    def handles(self) -> list[QueueHandle]:
        """One for each reader: the local ones, then the remote ones. Each goes to one process (or thread).

        They are good while this queue is open: ChannelClosedError after that, here and of who attaches to one.
        """
        if self._ended[0]:
            self._check()
        found = []
        writer = f"the writer of {self.name}"
        if self._local is not None:
            for index in range(len(self._local.links)):
                data = HandleData(queue=self.name, index=index, writer=writer)
                found.append(QueueHandle(data, self._local.fds(index), owned=False, ended=self._ended))
        for remote in self._remote.handles if self._remote is not None else ():
            data = HandleData(queue=self.name, index=remote.index, writer=writer, remote=remote)
            found.append(QueueHandle(data, (), owned=False, ended=self._ended))
        return found

    @property
    def url(self) -> str:
        """Where remote readers connect; empty without any."""
        return self._remote.url if self._remote is not None else ""

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Send one object to all readers; wait for room for at most ``timeout`` seconds (None: as long as they live).

        It is encoded once, and written when this returns: the caller may change it then. Raises:

        QueueTimeoutError (a TimeoutError): no room. It names who has not read, how much, since when. Nothing was sent.
        ChannelClosedError: a reader is gone, or the queue was closed, or this is a forked child of who made it.
        MessageTooLargeError: it can never fit.
        Whatever pickling raises for what cannot be sent.
        """
        deadline = None if timeout is None else deadline_after(timeout)
        encoded = kind, parts, buffers = self._encode(obj)
        if self._closed or self._watch.over or self._remote is not None:
            self._check()
        if self._inside and self._has_turn():
            raise TransportError(
                f"{self.name}: enqueue inside of enqueue (a signal handler, a finalizer): use a thread"
            )
        turn = self._turn
        try:
            # In here, since a signal handler may raise as soon as it is taken. No keywords, and no time where none is
            # needed: a fifth of what it takes with them
            if not turn.acquire(False) and not turn.acquire(
                timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())
            ):
                raise QueueTimeoutError(f"{self.name}: no turn within {timeout:g} s: another thread waits for room")
            self._inside = True
            try:
                local = self._local
                if self._remote is not None or local is None:
                    self._send(encoded, deadline)
                    return
                if len(parts) == 1 and not buffers:
                    data = parts[0]
                    if type(data) is bytes and len(data) <= local.small and local.write_small(data, kind):
                        return
                self._begin = 0.0
                local.write(encoded, deadline, self._alive)
            finally:
                self._inside = False
        except RPCTimeoutError:
            raise self._no_room(timeout) from None
        except QueueTimeoutError as exc:
            raise (exc if exc.args else self._no_room(timeout)) from None
        finally:
            try:
                turn.release()
            except RuntimeError:  # it never was this thread's
                pass

    def _no_room(self, timeout: float | None) -> QueueTimeoutError:
        who = "; ".join(self.laggards()) or "all have read everything by now"
        return QueueTimeoutError(f"{self.name}: no room within {timeout:g} s: {who}")

    def _send(self, encoded: Encoded, deadline: float | None) -> None:
        """To all readers or to none: remote ones only promise room before the local ones get it."""
        kind, parts, buffers = encoded
        remote = self._remote
        assert remote is not None
        self._begin = 0.0
        self._await_promise(remote, encoded, deadline)
        if self._local is not None:
            self._local.write(encoded, deadline, self._alive)
        remote.write(parts, kind, buffers)

    def _await_promise(self, remote: RemoteWriter, encoded: Encoded, deadline: float | None) -> None:
        _, parts, buffers = encoded

        def promised() -> bool | None:
            self._alive()
            return remote.ready(parts, buffers) or None

        if not promised() and self._waiter.wait(promised, deadline) is None:
            raise QueueTimeoutError

    def _alive(self) -> None:
        """Whether waiting for room has any sense. A long wait says for whom it is, once a minute; readers never do."""
        self._check()
        now = time.monotonic()
        if not self._begin:
            self._begin, self._next_word = now, now + LONG_WAIT_S
        elif now >= self._next_word:
            self._next_word = now + LONG_WAIT_S
            log.warning("%s: no room for %.0f s: %s", self.name, now - self._begin, "; ".join(self.laggards()))

    def _check(self) -> None:
        if self._closed:
            raise ChannelClosedError(f"{self.name}: {_why_closed(self, 'queue')}")
        if self._watch.over:
            raise ChannelClosedError(f"{self.name}: {self._watch.over}")
        if self._remote is not None:
            self._remote.check()

    def laggards(self) -> list[str]:
        """A line for each reader that has not read everything: who, how much, since when. Once closed: none."""
        if self._ended[0]:
            return []
        try:
            local = self._local.laggards() if self._local is not None else []
        except ValueError:  # another thread has just closed it
            return []
        return local + (self._remote.laggards() if self._remote is not None else [])

    def close(self, linger_s: float = LINGER_S) -> None:
        """Nothing more comes: readers get what was sent, then ChannelClosedError. Idempotent.

        Waits up to ``linger_s`` for remote readers to receive what is under way.
        """
        if self._closed or os.getpid() != self._maker:
            return
        self._closed = True
        self._ended[0] = True
        self._waiter.ring()
        with self._turn:
            self._watch.stop()
            if self._local is not None:
                self._local.close()
            if self._remote is not None:
                self._remote.close(linger_s)
            self._waiter.close()

    def __enter__(self) -> MessageQueue:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(LINGER_S if kind is None else 0.0)


class QueueReader:
    """A reading end (:meth:`MessageQueue.attach`). For one thread."""

    def __init__(
        self, handle: QueueHandle, codec: CodecRegistry | None = None, deaths: Sequence[DeathSource] = ()
    ) -> None:
        """See :meth:`MessageQueue.attach`."""
        handle.check()
        data = handle.data
        self.name = data.queue
        self._maker = os.getpid()
        codec = codec or CodecRegistry()
        self._decode: Decode = codec.decode
        self._closed = False
        self._writer = data.writer
        self._remote: RemoteReader | None = None
        self._link: Link | None = None
        self._sleep: Receive | None = None
        if data.remote is not None:
            from drumline.transport.remote import RemoteReader

            self._remote = RemoteReader(data.remote)
            self._writer = self._remote.name
            self._receive: Callable[[Decode], tuple[Any] | None] = self._receive_remote
        else:
            self._attach(handle.take(), data)
        try:
            if self._remote is None:
                self._waiter.rehearse(Rehearsal.of_objects(codec))
            waiter = self._remote or self._waiter
            self._wait = waiter.wait
            self._watch = _Watch(f"{data.queue}-watch", [self._link] if self._link else [], deaths, waiter.ring)
        except BaseException:
            self._close_parts()
            raise
        _ends.add(self)

    def _attach(self, fds: Sequence[int], data: HandleData) -> None:
        ring, writer_bell, own_bell, link, *arena = fds
        with ExitStack() as taken, ExitStack() as made:
            for fd in (ring, writer_bell, own_bell, *arena):
                taken.callback(os.close, fd)
            self._link = attach_link(link, data.writer)
            made.callback(self._link.close)
            self._waiter = Waiter.attach(own_bell)
            made.callback(self._waiter.close)
            self._bell = Doorbell.attach(writer_bell, 1 + data.index)
            made.callback(self._bell.close)
            self._queue = BroadcastQueue.attach(ring, *arena)
            made.callback(self._queue.close)
            self._reader = self._queue.reader(data.index, self._bell)
            self._reader.on_due = self._waiter.expect
            self._receive = self._reader.receive
            self._sleep = self._waiter.receiver(self._reader)
            made.pop_all()

    def dequeue(self, timeout: float | None = None) -> Any:
        """The next object; wait for it for at most ``timeout`` seconds (None: as long as the writer lives).

        This reader keeps nothing of it. Raises:

        QueueTimeoutError (a TimeoutError): none came.
        ChannelClosedError: everything was read and nothing more will come; it says why. Or this is a forked child of
        who attached.
        Whatever unpickling raises; the message is gone then, and the next one can be read.
        """
        if self._closed:
            raise ChannelClosedError(f"{self.name}: {_why_closed(self, 'reader')}")
        deadline = None if timeout is None else deadline_after(timeout)
        if self._sleep is not None:
            data = self._sleep_for_next(self._sleep, deadline)
            if data is not None:
                return self._reader.taken(data, self._decode)
        found = self._wait(self._take, deadline)
        if found is None:
            raise QueueTimeoutError(f"{self.name}: {self._name_writer()} has sent nothing within {timeout:g} s")
        return found[0]

    def _sleep_for_next(self, sleep: Receive, deadline: float | None) -> bytes | None:
        """The next message, if it comes by the shortest way, where nobody watches: one call of machine code that looks,
        sleeps and takes. None: by any other way, or not, or something else is the matter. :meth:`Waiter.wait` sees."""
        waiter = self._waiter
        while True:
            seen = waiter.look()
            if self._watch.over or self._closed or self._reader.current is not None:
                return None
            seconds = waiter.recheck_s
            if deadline is not None and (left := deadline - monotonic()) < seconds:
                seconds = left
                if left <= 0:
                    return None
            found = sleep(seen, int(seconds * 1e9))
            if type(found) is bytes:
                return found
            if found is not None:
                if found == LATE and seconds == waiter.recheck_s and self._reader.has_next():
                    waiter.found_late(seen)
                return None

    def _name_writer(self) -> str:
        return self._link.name if self._link is not None else self._writer

    def _take(self) -> tuple[Any] | None:
        """The next object, which is its own; None: none is there."""
        over = self._watch.over  # looked at first: what was written before it is found below
        if self._closed:
            raise ChannelClosedError(f"{self.name}: {_why_closed(self, 'reader')}")
        found = self._receive(self._decode)
        if found is None and over:
            raise ChannelClosedError(f"{self.name}: {over}")
        return found

    def _receive_remote(self, decode: Decode) -> tuple[Any] | None:
        assert self._remote is not None
        message = self._remote.poll()
        if message is None:
            return None
        try:
            return (decode(message.kind, message.data, message.buffers),)
        finally:
            message.release()

    def __iter__(self) -> Iterator[Any]:
        """Objects until the writer closes the queue. ChannelClosedError if it dies."""
        while True:
            try:
                obj = self.dequeue()
            except ChannelClosedError:
                if self._ended_well():
                    return
                raise
            yield obj
            del obj  # it is garbage before the next one is waited for, unless the caller keeps it

    def _ended_well(self) -> bool:
        if self._remote is not None:
            return self._remote.ended
        return self._link is not None and self._link.closed

    def close(self) -> None:
        """Read no more: the writer learns at once. Idempotent."""
        if self._closed or os.getpid() != self._maker:
            return
        self._closed = True
        self._watch.stop()
        self._close_parts()

    def _close_parts(self) -> None:
        if self._remote is not None:
            self._remote.close()
        else:
            self._reader.close()
            self._queue.close()
            self._bell.close()
            self._waiter.close()
        if self._link is not None:
            self._link.close()

    def __enter__(self) -> QueueReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
