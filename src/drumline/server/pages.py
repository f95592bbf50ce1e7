"""The chat page at ``/`` and the page of ``/docs``: files of this package, nothing from the network."""

from __future__ import annotations

import functools
from importlib import resources
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

if TYPE_CHECKING:
    from drumline.server.app import Endpoint
    from drumline.server.service import Service

# Texts of models are shown as text only, and nothing but this server may be talked to or load anything here.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
FILES = {
    "/": "chat.html",
    "/docs": "docs.html",
    "/page/chat.js": "chat.js",
    "/page/docs.js": "docs.js",
    "/page/style.css": "style.css",
    "/favicon.ico": "icon.svg",
}


@functools.cache
def content(name: str) -> bytes:
    """A file of the folder ``page``."""
    return resources.files("drumline.server").joinpath("page", name).read_bytes()


def _page(name: str) -> Endpoint:
    async def page(service: Service, request: Request) -> Response:
        return Response(content(name), headers={**HEADERS, "content-type": TYPES[name.rpartition(".")[2]]})

    return page


ROUTES: list[tuple[str, str, Endpoint]] = [("GET", path, _page(name)) for path, name in FILES.items()]
