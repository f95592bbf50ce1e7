"""A TCP proxy whose connections a test can cut, slow down and freeze."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading


class Proxy:
    """Forwards one address to another in a thread of its own, a piece at a time."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = (host, port)
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self._wake_read, self._wake = socket.socketpair()
        self.accepting = True
        self.frozen = False
        self.connections = 0
        self.piece = 1 << 16
        """Bytes that are forwarded at a time."""
        self.cut_after: int | None = None
        """Cut all connections after so many more bytes."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """End all connections, in the middle of whatever they carry."""
        with self._lock:
            for sock in list(self._pairs):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()
            self._pairs.clear()
        self._wake.send(b"x")

    def _run(self) -> None:
        while not self._stopping:
            with self._lock:
                sources = [] if self.frozen else list(self._pairs)
            ready, _, _ = select.select([self._listener, self._wake_read, *sources], [], [], 0.2)
            for sock in ready:
                if sock is self._listener:
                    self._accept()
                elif sock is self._wake_read:
                    self._wake_read.recv(100)
                else:
                    self._forward(sock)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            if not self.accepting:
                raise OSError
            server = socket.create_connection(self._target)
        except OSError:
            client.close()
            return
        self.connections += 1
        with self._lock:
            self._pairs |= {client: server, server: client}

    def _forward(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(self.piece)
            if data:
                self._pairs[sock].sendall(data)
                if self.cut_after is not None:
                    self.cut_after -= len(data)
                    if self.cut_after < 0:
                        self.cut_after = random.Random(self.connections).randrange(400, 40_000)
                        self.cut()
                return
        except (OSError, KeyError, ValueError):
            pass
        with self._lock:
            for end in (sock, self._pairs.pop(sock, None)):
                if end is not None:
                    self._pairs.pop(end, None)
                    end.close()

    def close(self) -> None:
        self._stopping = True
        self.cut()
        self._thread.join()
        for sock in (self._listener, self._wake, self._wake_read):
            sock.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
