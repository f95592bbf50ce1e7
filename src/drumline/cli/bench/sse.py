"""Server-sent events, as the HTML standard has them: pure, bytes in, the data of whole events out.

Lines end with CRLF, LF or CR, also where a read ends between the two; a blank line ends an event; several ``data``
lines are joined; comments and other fields are skipped. Servers of the OpenAI API write ``data: {...}`` and a blank
line, and for that there is a short way.
"""

from __future__ import annotations

MAX_EVENT_BYTES = 64 << 20
"""An event that never ends is an error, not a reason to fill the memory."""


class EventTooLargeError(ValueError):
    """More than MAX_EVENT_BYTES without a blank line."""


class EventReader:
    """Collects events from bytes that may be split anywhere."""

    def __init__(self) -> None:
        self._rest = b""
        self._after_cr = False
        self._begun = False

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that ends in ``data``, in order."""
        if self._after_cr and data:
            # The CR has ended the line already.
            self._after_cr = False
            data = data[1:] if data[0] == 10 else data
        if b"\r" in data:
            self._after_cr = data[-1] == 13
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if not self._begun:
            data = self._without_mark(data)
        *blocks, self._rest = (self._rest + data if self._rest else data).split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLargeError(f"an event has more than {MAX_EVENT_BYTES} bytes")
        events = []
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block:
                events.append(block[6:])
            elif (found := _data(block)) is not None:
                events.append(found)
        return events

    def _without_mark(self, data: bytes) -> bytes:
        """The stream may begin with a byte-order mark."""
        data = self._rest + data
        self._rest = b""
        if data[:3] == b"\xef\xbb\xbf":
            self._begun = True
            return data[3:]
        self._begun = not b"\xef\xbb\xbf".startswith(data)
        return data

    @property
    def unfinished(self) -> bytes:
        """What was begun and has not ended; the standard says to drop it."""
        return self._rest.strip(b"\n")


def _data(block: bytes) -> bytes | None:
    """The data of an event's lines; None if it has none."""
    found: list[bytes] = []
    for line in block.split(b"\n"):
        name, _, value = line.partition(b":")
        if name == b"data":
            found.append(value[1:] if value[:1] == b" " else value)
    return b"\n".join(found) if found else None
