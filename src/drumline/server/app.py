"""All routes of the server as one ASGI application.

Plain Starlette with msgspec, not FastAPI. Measured (Python 3.11, 2 cores): FastAPI 0.165 with pydantic costs 175 ms of
import and 14 MiB more than Starlette 1.10 (all imports of the API server: 0.23 s and 50 MiB, or 0.41 s and 64 MiB),
and what it adds (models, validation, schema) msgspec has, which the engine's protocol needs anyway.

Routes under ``/v1``, and those of the tokenizer, need the API key if there is one; health, metrics and pages do not,
since orchestrators and browsers cannot send it.

A server for this machine alone and without a key trusts who can reach it, and web pages can, through their visitor's
browser: by a name of theirs that they let point to 127.0.0.1 (DNS rebinding), or by requests to other origins. Such
requests carry a foreign ``Host`` or ``Origin`` and are refused. Programs send no ``Origin``, our page its own.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from email.utils import formatdate
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import drumline
from drumline.server import pages
from drumline.server.answers import ChatWriter, CompletionWriter, Events, Shape, Writer, whole
from drumline.server.errors import ApiError, as_api_error, internal
from drumline.server.generation import Generation
from drumline.server.http import DIRECT as DIRECT_BODY
from drumline.server.http import (
    ClientGoneError,
    Direct,
    EventStream,
    json_response,
    read_json,
    until_gone,
    whole_number,
)
from drumline.server.logprobs import Spelling
from drumline.server.metrics import CONTENT_TYPE
from drumline.server.openapi import openapi
from drumline.server.prompts import Prepared, TextRoom
from drumline.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Load,
    Model,
    ModelList,
    SamplingFields,
    Status,
    TokenizeRequest,
    Version,
)
from drumline.server.service import Service
from drumline.server.sockets import names_this_machine

log = logging.getLogger(__name__)

Body = TypeVar("Body", bound=SamplingFields)
Endpoint = Callable[[Service, Request], Awaitable[Response]]


def create_app(service: Service) -> Starlette:
    """The application. ``service`` may become ready later; until then routes that need an engine answer 503."""

    def bound(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def route(request: Request) -> Response:
            try:
                return await endpoint(service, request)
            except ClientGoneError:
                return Response(status_code=499)
            except Exception as e:
                error = as_api_error(e)
                if error is None:
                    raise
                return error.response()

        return route

    app = Starlette(
        routes=[Route(path, bound(endpoint), methods=[method]) for method, path, endpoint in ROUTES],
        middleware=[Middleware(Outer, service=service, direct={path: bound(endpoint) for path, endpoint in DIRECT})],
        exception_handlers={HTTPException: _http_error, Exception: _unexpected},
    )
    app.router.redirect_slashes = False
    return app


class Outer:
    """Around every route: the key, the date header, the count of answers, and no answer without a shape."""

    def __init__(
        self, app: ASGIApp, service: Service, direct: Mapping[str, Callable[[Request], Awaitable[Response]]]
    ) -> None:
        """``direct``: routes of POST by path that need not go through Starlette's router and what is around it."""
        self._app = app
        self._service = service
        self._direct = direct
        # Digests have one length, so the comparison tells nothing about that of the key either.
        self._keys = [hashlib.sha256(key.encode()).digest() for key in service.api_keys]
        self._date = (0, b"")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"date", self._now())]
                if self._service.leaving and not _unread(scope):
                    message["headers"].append((b"connection", b"close"))
                handler = scope["path"] if scope["path"] in PATHS else "other"
                method = scope["method"] if scope["method"] in METHODS else "other"
                self._service.metrics.http[method, handler, str(message["status"])] += 1
            await send(message)

        if scope["path"].startswith(GUARDED) and self._keys and not self._may_pass(scope):
            await _unauthorized().response()(scope, receive, counted)
            return
        if self._service.local is not None and not self._keys and (error := _foreign(scope, self._service.local)):
            await error.response()(scope, receive, counted)
            return
        direct = self._direct.get(scope["path"]) if scope["method"] == "POST" else None
        if direct is None:
            await self._app(scope, receive, counted)
            return
        response = await direct(Request(scope, receive, counted))
        await response(scope, receive, counted)

    def _may_pass(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = given.partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        # All keys are compared, whichever fits.
        fits = [hmac.compare_digest(digest, key) for key in self._keys]
        return scheme.lower() == b"bearer" and any(fits)

    def _now(self) -> bytes:
        """HTTP date, formatted once a second; uvicorn would tick ten times a second for it."""
        now = int(time.time())
        if self._date[0] != now:
            self._date = (now, formatdate(now, usegmt=True).encode())
        return self._date[1]


def _unread(scope: Scope) -> bool:
    """A client that is still sending would see a reset, and not the answer, if its connection were closed now."""
    direct: Direct | None = scope.get(DIRECT_BODY)
    return direct is not None and direct.unread


def _foreign(scope: Scope, bound: str) -> ApiError | None:
    """403 for what another web page makes a browser of this machine send."""
    headers = dict(scope["headers"])
    host, origin = headers.get(b"host"), headers.get(b"origin")
    # No browser leaves Host out.
    if host is not None and not names_this_machine(host.decode("latin-1"), bound):
        message = "This server is for this machine alone: address it as localhost, or set --api-key and --host."
        return ApiError(403, message, type="permission_error", code="host_not_allowed")
    if origin is None or scope["method"] in ("GET", "HEAD", "OPTIONS"):
        return None
    # Behind a proxy the scheme may be the other one; "null" is what a page in a sandbox has.
    if host is not None and origin.lower() in (b"http://" + host.lower(), b"https://" + host.lower()):
        return None
    message = "Web pages from elsewhere may not use this server while it has no --api-key."
    return ApiError(403, message, type="permission_error", code="origin_not_allowed")


def _unauthorized() -> ApiError:
    return ApiError(
        401,
        "Missing or wrong API key: send it as 'Authorization: Bearer <key>'.",
        type="authentication_error",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and wrong methods, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        return ApiError(404, f"There is no {path} here; /docs lists the routes.", code="unknown_route").response()
    if error.status_code == 405:
        allowed = ", ".join(sorted(method for method, known, _ in ROUTES if known == path))
        message = f"{path} does not take {request.method}" + (f", but {allowed}." if allowed else ".")
        headers = {"allow": allowed} if allowed else None
        return ApiError(405, message, code="method_not_allowed", headers=headers).response()
    return ApiError(error.status_code, error.detail).response()


async def _unexpected(request: Request, error: Exception) -> Response:
    """A fault of ours. Starlette raises it again afterwards, so that it is logged with its traceback."""
    return internal().response()


# ------------------------------------------------------------------------------------------------------ OpenAI routes


def _check_model(service: Service, body: SamplingFields | TokenizeRequest | DetokenizeRequest) -> str:
    """Name under which the client knows the model."""
    if body.model is None or body.model == "":
        return service.names[0]
    if body.model not in service.names:
        known = ", ".join(repr(name) for name in service.names)
        raise ApiError(
            404, f"The model {body.model!r} is not served here, but {known}.", param="model", code="model_not_found"
        )
    return body.model


async def chat(service: Service, request: Request) -> Response:
    """``POST /v1/chat/completions``."""
    return await _generate(service, request, ChatRequest, TextRoom.chat, ChatWriter, "chatcmpl")


async def completions(service: Service, request: Request) -> Response:
    """``POST /v1/completions``."""
    return await _generate(service, request, CompletionRequest, TextRoom.completion, CompletionWriter, "cmpl")


async def _generate(
    service: Service,
    request: Request,
    kind: type[Body],
    prepare: Callable[[TextRoom, Body, str], Prepared],
    writer: type[ChatWriter] | type[CompletionWriter],
    prefix: str,
) -> Response:
    """Read, check, prepare, run, answer."""
    arrival = time.monotonic()
    engine, text = service.require_ready()
    body, size = await read_json(request, kind)
    model = _check_model(service, body)
    service.admit()
    name = f"{prefix}-{uuid.uuid4().hex}"
    prepared = await text.prepared(size, lambda: prepare(text, body, name))
    # Preparing takes time: it may all be over by now.
    service.require_ready(admitted=True)
    generation = Generation(
        engine,
        service.metrics,
        text.tokenizer,
        prepared.requests,
        arrival,
        prompt_only=prepared.echo_only,
        interval=whole_number(body.stream_interval, "stream_interval", 1, 1 << 20) or 1,
    )
    shape = Shape(
        id=f"{prefix}-{body.request_id}" if body.request_id else name,
        model=model,
        fingerprint=service.fingerprint,
        num_top=prepared.num_top,
        spelling=Spelling(text.token_bytes, as_ids=bool(body.return_tokens_as_token_ids) or text.tokenizer is None),
        prompts=[one.prompt_token_ids for one in prepared.requests],
        n=prepared.requests[0].params.n,
        echo=prepared.echo,
        role=prepared.role,
        token_ids=bool(body.return_token_ids),
    )
    return await _answer(service, request, body, generation, writer(shape))


async def _answer(
    service: Service, request: Request, body: SamplingFields, generation: Generation, writer: Writer
) -> Response:
    if body.stream:
        with_ids = bool(body.return_token_ids)
        return EventStream(service, Events(generation, writer, body.stream_options, with_ids=with_ids))
    data = await until_gone(service, request.receive, whole(generation, writer))
    return Response(data, media_type="application/json")


async def tokenize(service: Service, request: Request) -> Response:
    """``POST /tokenize``."""
    _, text = service.require_ready()
    body, size = await read_json(request, TokenizeRequest)
    service.admit()
    _check_model(service, body)
    return json_response(await text.prepared(size, lambda: text.tokenize(body)))


async def detokenize(service: Service, request: Request) -> Response:
    """``POST /detokenize``."""
    _, text = service.require_ready()
    body, size = await read_json(request, DetokenizeRequest)
    service.admit()
    _check_model(service, body)
    return json_response(await text.prepared(size, lambda: text.detokenize(body)))


def _models(service: Service) -> list[Model]:
    length = service.engine.info.max_model_len if service.engine is not None and service.engine.info else None
    return [
        Model(id=name, created=service.created, root=service.root or name, max_model_len=length)
        for name in service.names
    ]


async def models(service: Service, request: Request) -> Response:
    """``GET /v1/models``."""
    return json_response(ModelList(data=_models(service)))


async def model(service: Service, request: Request) -> Response:
    """``GET /v1/models/{id}``; ids may contain slashes."""
    name = request.path_params["id"]
    for entry in _models(service):
        if entry.id == name:
            return json_response(entry)
    raise ApiError(404, f"The model {name!r} is not served here.", param="model", code="model_not_found")


# ------------------------------------------------------------------------------------------------------------- health


async def health(service: Service, request: Request) -> Response:
    """``GET /health`` and ``/readyz``: 200 if requests may be sent here, else 503 with the reason.

    What ranks write into shared memory anyway is looked at; a probe puts no work into the engine.
    """
    service.probe()
    service.require_progress()
    return json_response(Status(status="ok"))


async def livez(service: Service, request: Request) -> Response:
    """``GET /livez``: 200 as long as this process answers."""
    return json_response(Status(status="alive"))


async def startupz(service: Service, request: Request) -> Response:
    """``GET /startupz``: what every process is doing; 200 once the start is over, also while the engine is started
    again; 503 before that and once it has failed."""
    state = service.startup_state()
    return json_response(state, 200 if state.status in ("ready", "recovering") else 503)


async def live_report(service: Service, request: Request) -> Response:
    """``GET /debug/report``: what every process is doing, with the stacks of all threads. Puts no work into the engine.

    Stacks tell paths of this machine: with an API key, or where only this machine can ask.
    """
    if not service.api_keys and service.local is None:
        message = "Stacks are for operators: serve with --api-key, on loopback, or send SIGUSR1 to the server."
        raise ApiError(403, message, type="permission_error", code="not_for_everybody")
    return json_response(await service.live_report("asked for over HTTP"))


async def load(service: Service, request: Request) -> Response:
    """``GET /load``: requests that are being answered."""
    return json_response(Load(server_load=service.metrics.load))


async def version(service: Service, request: Request) -> Response:
    """``GET /version``."""
    return json_response(Version(version=drumline.__version__))


async def metrics(service: Service, request: Request) -> Response:
    """``GET /metrics``, for Prometheus."""
    return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE})


async def schema(service: Service, request: Request) -> Response:
    """``GET /openapi.json``."""
    return Response(openapi(drumline.__version__), media_type="application/json")


ROUTES: list[tuple[str, str, Endpoint]] = [
    ("POST", "/v1/chat/completions", chat),
    ("POST", "/v1/completions", completions),
    ("GET", "/v1/models", models),
    ("GET", "/v1/models/{id:path}", model),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("GET", "/health", health),
    ("GET", "/ping", health),
    ("POST", "/ping", health),
    ("GET", "/livez", livez),
    ("GET", "/readyz", health),
    ("GET", "/startupz", startupz),
    ("GET", "/debug/report", live_report),
    ("GET", "/load", load),
    ("GET", "/version", version),
    ("GET", "/metrics", metrics),
    ("GET", "/openapi.json", schema),
    *pages.ROUTES,
]
DIRECT: list[tuple[str, Endpoint]] = [("/v1/chat/completions", chat), ("/v1/completions", completions)]
"""Routes that matter for the time to the first token: Starlette takes 50 us for what a dictionary tells."""
GUARDED = ("/v1", "/tokenize", "/detokenize", "/debug")
"""Beginnings of paths that need the key."""
PATHS = frozenset(path for _, path, _ in ROUTES)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
