"""Where one HTTP/1.1 message ends and the next begins: decided here, once, and by nobody else.

A server that frames in two places can be talked into two opinions (request smuggling), and a parser that collects
pieces of a head without a limit can be kept busy by one client: httptools joins a header value that comes in n pieces
in n^2 time, without bound. So bytes are collected here until a head is complete, within limits; only a complete head,
and nothing but heads, goes to httptools. Bodies never meet a parser that looks for heads.

What is ambiguous is refused, not repaired: bare CR or LF, folded lines, white space before a colon, two
Content-Lengths, Content-Length with Transfer-Encoding, any coding but ``chunked``, trailers. One edit is made:
``Upgrade`` goes. A server may ignore it (Java's HTTP client asks for h2c with every first request), but httptools
would take what follows for another protocol, and the body would be lost.

Everything here is pure: bytes in, bytes or :class:`~drumline.server.errors.ApiError` out, in linear time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol as Interface

from drumline.server.errors import ApiError, bad_request

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 200
MAX_REQUEST_LINE = 16 << 10
MAX_CHUNKS = 1 << 18
"""Of one body: 128 bytes each at the largest body. Millions of tiny ones would cost more than what they carry."""
MAX_CHUNK_LINE = 256
MAX_LENGTH_DIGITS = 15

_BARE = re.compile(rb"(?<!\r)\n|\r(?=[^\n])")
_REQUEST_LINE = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+) ([!-~]+) HTTP/1\.([01])")
_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[\t -~]*)?")


class Body(Interface):
    """Decodes the body of one message."""

    done: bool

    def take(self, data: bytearray) -> bytes:
        """Remove what belongs to the body from the front of ``data``; the content in it. ApiError if it is wrong."""


class Fixed:
    """Exactly so many bytes."""

    def __init__(self, length: int) -> None:
        self.left = length
        self.done = length == 0

    def take(self, data: bytearray) -> bytes:
        """See :class:`Body`."""
        part = bytes(data[: self.left])
        del data[: len(part)]
        self.left -= len(part)
        self.done = self.left == 0
        return part


class Chunked:
    """``Transfer-Encoding: chunked``. Extensions are skipped, trailers refused."""

    def __init__(self) -> None:
        self.done = False
        self._left = 0
        """Of the current chunk, its CRLF included."""
        self._chunks = 0

    def take(self, data: bytearray) -> bytes:
        """See :class:`Body`."""
        parts: list[bytes] = []
        at = 0
        while at < len(data) and not self.done:
            if self._left:
                at = self._content(data, at, parts)
                continue
            end = data.find(b"\r\n", at, at + MAX_CHUNK_LINE)
            if end < 0:
                if len(data) - at >= MAX_CHUNK_LINE:
                    raise _malformed("a chunk's size line is too long")
                break
            match = _CHUNK_LINE.fullmatch(data, at, end)
            if match is None:
                raise _malformed("a chunk's size is not a hexadecimal number")
            size = int(match[1], 16)
            if size == 0:
                last = data[end + 2 : end + 4]
                if len(last) < 2 and b"\r\n".startswith(last):
                    break
                if last != b"\r\n":
                    raise _malformed("trailers are not taken")
                at, self.done = end + 4, True
                continue
            self._chunks += 1
            if self._chunks > MAX_CHUNKS:
                raise _malformed(f"it has more than {MAX_CHUNKS} chunks")
            at, self._left = end + 2, size + 2
        del data[:at]
        return b"".join(parts)

    def _content(self, data: bytearray, at: int, parts: list[bytes]) -> int:
        """Content of the current chunk and the CRLF behind it; the place behind what was used."""
        content = bytes(data[at : at + max(0, self._left - 2)])
        parts.append(content)
        at += len(content)
        self._left -= len(content)
        while 0 < self._left <= 2 and at < len(data):
            if data[at] != b"\r\n"[2 - self._left]:
                raise _malformed("a chunk is longer than it says")
            at, self._left = at + 1, self._left - 1
        return at


@dataclass(frozen=True)
class Head:
    """A complete head that this server takes."""

    data: bytes
    """For httptools."""
    body: Body


class HeadCollector:
    """Finds the end of a head in bytes that come in pieces. Every byte is looked at once."""

    def __init__(self) -> None:
        self._seen = 0

    def take(self, data: bytearray) -> Head | None:
        """Remove one head from the front of ``data``; None: more is needed. ApiError if it is too large or wrong."""
        start = max(0, self._seen - 3)
        end = data.find(b"\r\n\r\n", start, MAX_HEAD_BYTES)
        limit = min(end + 4 if end >= 0 else len(data), MAX_HEAD_BYTES)
        if _BARE.search(data, max(0, self._seen - 1), limit):
            raise bad_request("The request's head has a CR or LF alone; lines end with CRLF.", code="invalid_request")
        # An empty line in front of a request is what old clients leave behind a body.
        if len(data) > MAX_REQUEST_LINE + 2 and data.find(b"\r\n", 2, MAX_REQUEST_LINE + 2) < 0:
            raise ApiError(414, f"The request line has more than {MAX_REQUEST_LINE} bytes.", code="uri_too_long")
        if end < 0:
            if len(data) >= MAX_HEAD_BYTES:
                raise _too_large(f"{MAX_HEAD_BYTES} bytes")
            self._seen = len(data)
            return None
        self._seen = 0
        head = bytes(data[:end])
        del data[: end + 4]
        return parse_head(head.removeprefix(b"\r\n"))


def parse_head(data: bytes) -> Head:
    """Check a head (without the empty line), drop the wish for another protocol, and tell how long the body is."""
    request, *lines = data.split(b"\r\n")
    if len(lines) > MAX_HEADERS:
        raise _too_large(f"{MAX_HEADERS} lines")
    match = _REQUEST_LINE.fullmatch(request)
    if match is None or match[1] == b"CONNECT":
        raise bad_request("The request line is not one of HTTP/1.1.", code="invalid_request")
    kept, lengths, codings, hosts = [request], [], [], 0
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise bad_request("A header line is malformed.", code="invalid_request")
        name, value = field[1].lower(), field[2].rstrip(b" \t")
        if name == b"upgrade":
            continue
        if name == b"connection":
            tokens = [token.strip() for token in value.split(b",")]
            value = b", ".join(token for token in tokens if token.lower() != b"upgrade")
            line = b"connection: " + value
        elif name == b"content-length":
            lengths.append(value)
        elif name == b"transfer-encoding":
            codings.append(value.lower())
        elif name == b"host":
            hosts += 1
        kept.append(line)
    if hosts > 1:
        raise bad_request("The request has more than one Host.", code="invalid_request")
    body = _body(lengths, codings, old=match[3] == b"0")
    return Head(b"\r\n".join(kept) + b"\r\n\r\n", body)


def _body(lengths: list[bytes], codings: list[bytes], *, old: bool) -> Body:
    """What frames the body. ``old``: HTTP/1.0, which has no codings."""
    if codings:
        if lengths or old or codings != [b"chunked"]:
            raise bad_request(
                "Transfer-Encoding can only be 'chunked', once, in HTTP/1.1 and without Content-Length.",
                code="invalid_request",
            )
        return Chunked()
    if not lengths:
        return Fixed(0)
    if len(lengths) > 1 or not lengths[0].isdigit() or len(lengths[0]) > MAX_LENGTH_DIGITS:
        raise bad_request("Content-Length must be one decimal number.", code="invalid_request")
    return Fixed(int(lengths[0]))


def _too_large(limit: str) -> ApiError:
    return ApiError(431, f"The request's headers are more than {limit}.", code="headers_too_large")


def _malformed(why: str) -> ApiError:
    return bad_request(f"The chunked body is malformed: {why}.", code="invalid_request")
