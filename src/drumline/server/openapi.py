"""The OpenAPI document: schemas from the msgspec structs, descriptions from their docstrings."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

import msgspec

from drumline.server.errors import ErrorBody
from drumline.server.schema import (
    REFUSED,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    Model,
    ModelList,
    SamplingFields,
    StartupState,
    StreamOptions,
)

TYPES = (
    ChatRequest,
    CompletionRequest,
    ChatCompletion,
    ChatChunk,
    Completion,
    Model,
    ModelList,
    StartupState,
    ErrorBody,
)
DESCRIBED = (ChatRequest, CompletionRequest, SamplingFields, StreamOptions, StartupState)
DESCRIPTION = (
    "OpenAI-compatible API. Unknown parameters are ignored. Known ones that are not built yet are refused with a 400 "
    "unless they have their default: " + ", ".join(sorted(REFUSED)) + "."
)


def _ref(kind: type[Any]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _json(text: str, kind: type[Any] | None = None, **more: Any) -> dict[str, Any]:
    content = {"application/json": {"schema": _ref(kind)} if kind is not None else {}} | more
    return {"description": text, "content": content}


def _get(summary: str, kind: type[Any] | None = None, *, ready: bool = False, text: str = "OK") -> dict[str, Any]:
    responses = {"200": _json(text, kind)}
    if ready:
        responses["503"] = _json("Not now; the message says why", kind or ErrorBody)
    return {"get": {"summary": summary, "responses": responses}}


def _post(summary: str, body: type[Any], answer: type[Any], event: type[Any]) -> dict[str, Any]:
    stream = {"text/event-stream": {"schema": _ref(event)}}
    errors = {
        "400": "Bad JSON or a bad parameter",
        "401": "Missing or wrong key",
        "404": "Unknown model",
        "413": "Body too large",
        "503": "Not ready, stopping, or the engine died",
    }
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(body)}}},
            "responses": {
                "200": _json("The answer; with stream: true, events that end with [DONE]", answer, **stream),
                **{status: _json(text, ErrorBody) for status, text in errors.items()},
            },
        }
    }


def _paths() -> dict[str, Any]:
    by_id = _get("One model", Model)
    by_id["get"]["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return {
        "/v1/chat/completions": _post("Answer a conversation", ChatRequest, ChatCompletion, ChatChunk),
        "/v1/completions": _post("Continue a prompt", CompletionRequest, Completion, Completion),
        "/v1/models": _get("Models served here", ModelList),
        "/v1/models/{id}": by_id,
        "/health": _get("200 if a request would be served now", ready=True),
        "/readyz": _get("The same", ready=True),
        "/livez": _get("200 as long as the server's process answers"),
        "/startupz": _get("Phase of each process", StartupState, ready=True),
        "/version": _get("Version of drumline"),
        "/metrics": {"get": {"summary": "Prometheus metrics", "responses": {"200": {"description": "Text format"}}}},
    }


def _attribute_docs(kind: type[Any]) -> dict[str, str]:
    """Docstrings under the fields of a class."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            docs[field.target.id] = inspect.cleandoc(str(ast.literal_eval(text.value)))
    return docs


def _schemas() -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(TYPES, ref_template="#/components/schemas/{name}")
    docs = {name: text for kind in DESCRIBED for name, text in _attribute_docs(kind).items()}
    for kind in (ChatRequest, CompletionRequest, StreamOptions, StartupState):
        for name, field in schemas[kind.__name__]["properties"].items():
            if name in docs:
                field["description"] = docs[name]
            elif name in REFUSED:
                field["description"] = "Not built yet: refused unless it has its default."
    return schemas


@functools.cache
def openapi(version: str) -> bytes:
    """JSON of the document."""
    document = {
        "openapi": "3.1.0",
        "info": {"title": "drumline", "version": version, "description": DESCRIPTION},
        "paths": _paths(),
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }
    return msgspec.json.encode(document)
