"""The gate of a ZMQ listener: who may come in, how many may knock at once, and one line about those who may not.

::

    kernel: accept queue  ->  ZMQ's IO thread: handshake (CURVE)  ->  ZAP: is this public key one of ours?  ->  socket
       ^  a filter that drops every SYN, while too many knock                ^                     |
       +---------------------------------------  Gate  --------------------- +  <-- monitor events +

* **Keys.** The listener's socket speaks CURVE only, so whoever comes needs the listener's public key to be understood,
  and a secret key whose public one is on the list. Both pairs are made for one run. Nothing of ours sees a byte of
  anyone else; what ZMQ itself parses before that (greeting, commands) has a limit of ``CONTROL_MAX`` bytes a frame and
  of HANDSHAKE_S seconds in all.
* **Floods.** ZMQ accepts whatever comes, and its IO thread spins when descriptors run out. So of the connections that
  have not proved themselves the oldest are ended when there are more than KNOCKING_MAX: a handshake of ours takes
  milliseconds, so silent ones, however many and however often they come again, keep none of ours out. The listening
  socket is ours (``ZMQ_USE_FD``), and when they come faster than they can be ended (FLOOD_MAX), a socket filter on it
  drops new ones for a moment. A peer of ours that comes just then is not refused: its SYN is sent again by its kernel.
  Connections that are in use do not notice.
* **Log.** The first refusal is logged, then at most one line a minute, with the count.

Rejected: ``unbind`` under a flood: ZMQ then ends the connections which the listener had accepted, ours too. Counting
handshake events: they do not say which connection they mean; a connection is known by its descriptor number instead,
which "accepted" and "disconnected" carry, and every received frame (``ZMQ_SRCFD``).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping

import zmq
import zmq.utils.z85

from drumline.transport import addresses
from drumline.transport.remote_wire import CONTROL_MAX

HANDSHAKE_S = 5.0
"""Seconds after which a connection that has not proved itself is closed."""
KNOCKING_MAX = 64
"""Connections that may be open at a time without having proved themselves."""
FLOOD_MAX = 4 * KNOCKING_MAX
"""At so many, those that were ended and are not gone yet included, new ones have to wait."""
LOG_EVERY_S = 60.0
"""Seconds between two lines about refused connections."""

_BACKLOG = 64
_DOMAIN = b"drumline"
_ZAP = "inproc://zeromq.zap.01"
_SO_ATTACH_FILTER = 26
_SO_DETACH_FILTER = 27
_DROP_ALL = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))  # one BPF instruction: return 0
_FILTER = struct.pack("HL", 1, ctypes.addressof(_DROP_ALL))
_EVENT = struct.Struct("=HI")
_WATCHED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

log = logging.getLogger("drumline.transport")


def curve_keys() -> tuple[bytes, bytes]:
    """A new key pair, public and secret (32 bytes each)."""
    public, secret = zmq.curve_keypair()
    return zmq.utils.z85.decode(public), zmq.utils.z85.decode(secret)


def drain(sock: zmq.Socket[bytes]) -> list[list[bytes]]:
    """All messages that are there. Afterwards the socket's descriptor (``ZMQ_FD``) wakes for the next ones."""
    found = []
    with contextlib.suppress(zmq.Again):
        while True:
            found.append(sock.recv_multipart(zmq.NOBLOCK))
    return found


def events(monitor: zmq.Socket[bytes]) -> list[tuple[int, int]]:
    """What a monitor socket has to tell: event numbers and their values."""
    return [_EVENT.unpack(frames[0]) for frames in drain(monitor)]


class Refusals:
    """Counts refused connections and says so, once a minute at most."""

    def __init__(self, where: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._where = where
        self._clock = clock
        self._next = 0.0
        self._untold = 0
        self.count = 0
        """Refused so far."""

    def add(self, why: str) -> None:
        """One more."""
        self.count += 1
        self._untold += 1
        now = self._clock()
        if now < self._next:
            return
        self._next = now + LOG_EVERY_S
        log.warning(
            "%s: %d connection(s) refused that are not from this run (%s); more are counted and told in %d s at the "
            "earliest",
            self._where,
            self._untold,
            why,
            LOG_EVERY_S,
        )
        self._untold = 0


class Gate:
    """Binds ``router`` to one address and guards it. Used under the router's lock; :meth:`serve` when ``fds`` wake."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        host: str,
        port: int,
        secret: bytes,
        allowed: Mapping[bytes, str],
        on_gone: Callable[[int], None],
    ) -> None:
        """Listen.

        Args:
            context: the socket's; the gate's handler is the only one in it.
            router: a new socket.
            host: address to listen on, and nothing else.
            port: 0 for any free one.
            secret: the listener's key.
            allowed: public keys of the peers; what the user id of their frames is.
            on_gone: called with the descriptor number of each connection that ended.

        """
        self._allowed = dict(allowed)
        self._on_gone = on_gone
        self._open: dict[int, None] = {}
        """Connections, the oldest first."""
        self._ours: set[int] = set()
        self._ended: set[int] = set()
        """Those that were ended here and are not gone yet."""
        self._shut = False
        self._can_shut = True
        listener, self.url = addresses.listen(host, port, _BACKLOG)
        self._port = listener.getsockname()[1]
        self._listener = listener.dup()  # ZMQ closes the one that it gets; they are one socket to the kernel
        self.refusals = Refusals(f"listener {self.url}")
        self._zap: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(_ZAP)
        router.curve_server = True
        router.curve_secretkey = secret
        router.zap_domain = _DOMAIN
        router.maxmsgsize = CONTROL_MAX
        router.handshake_ivl = int(HANDSHAKE_S * 1000)
        router.ipv6 = listener.family == socket.AF_INET6
        self._monitor: zmq.Socket[bytes] = router.get_monitor_socket(_WATCHED)
        router.set(zmq.USE_FD, listener.detach())
        router.bind(self.url)
        self.fds = (int(self._zap.get(zmq.FD)), int(self._monitor.get(zmq.FD)))

    def serve(self) -> None:
        """Answer who asks to come in, count who is there."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._zap.send_multipart(self._answer(self._zap.recv_multipart(zmq.NOBLOCK)))
        for event, value in events(self._monitor):
            if event == zmq.EVENT_ACCEPTED:
                self._open.pop(value, None)
                self._open[value] = None
            elif event == zmq.EVENT_DISCONNECTED:
                self._open.pop(value, None)
                self._ended.discard(value)
                if value in self._ours:
                    self._ours.discard(value)
                    self._on_gone(value)
            else:
                self.refusals.add(_REASONS.get(event, "a failed handshake"))
        self._open_or_shut()

    def proved(self, fd: int) -> None:
        """Connection ``fd`` sent a frame, so it holds one of our keys."""
        self._ours.add(fd)

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        """ZAP: version, request id, domain, address, identity, mechanism, public key."""
        request = frames[1] if len(frames) > 1 else b""
        user = self._allowed.get(frames[6]) if len(frames) == 7 and frames[5] == b"CURVE" else None
        if user is None:
            return [b"1.0", request, b"400", b"not on the list", b"", b""]
        return [b"1.0", request, b"200", b"OK", user.encode(), b""]

    def _open_or_shut(self) -> None:
        unproved = [fd for fd in self._open if fd not in self._ours]
        knocking = [fd for fd in unproved if fd not in self._ended]
        for fd in knocking[: max(0, len(knocking) - KNOCKING_MAX)]:
            self._end(fd)
        if not self._shut and len(unproved) > FLOOD_MAX and self._can_shut:
            self._shut = self._can_shut = self._filter(_SO_ATTACH_FILTER, _FILTER)
            self.refusals.add(f"{len(unproved)} at once: new ones wait until these are gone")
        elif self._shut and len(unproved) <= KNOCKING_MAX:
            self._filter(_SO_DETACH_FILTER, struct.pack("i", 0))
            self._shut = False

    def _end(self, fd: int) -> None:
        """ZMQ, which has the descriptor, sees the end of the stream. Its number may be somebody else's by now."""
        self._ended.add(fd)
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockname()[1] == self._port:
                sock.shutdown(socket.SHUT_RDWR)

    def _filter(self, option: int, value: bytes) -> bool:
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, option, value)
        except OSError as exc:  # no such filter on this kernel: the time limit of handshakes is all there is then
            log.warning("cannot hold back connections to %s: %s", self.url, os.strerror(exc.errno or 0))
            return False
        return True

    def close(self) -> None:
        """Close all but the router."""
        self._zap.close(0)
        self._monitor.close(0)
        self._listener.close()


_REASONS: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "a key that is not on the list",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "no CURVE handshake, or the wrong key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "gone or silent before the end of the handshake",
}
