"""The OpenAPI document: schemas from the msgspec structs, descriptions from their docstrings."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

import msgspec

from drumline.plan.sampling import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY
from drumline.processes.live import LiveReport
from drumline.server.errors import ErrorBody
from drumline.server.prompts import INT32, INT64, MAX_CHOICES, MAX_N, MAX_STOPS
from drumline.server.schema import (
    REFUSED,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    Detokenized,
    DetokenizeRequest,
    Load,
    Model,
    ModelList,
    SamplingFields,
    StartupState,
    Status,
    StreamOptions,
    Tokenized,
    TokenizeRequest,
    Version,
)
from drumline.text.chat import ROLES

TYPES = (
    ChatRequest,
    CompletionRequest,
    ChatCompletion,
    ChatChunk,
    Completion,
    TokenizeRequest,
    Tokenized,
    DetokenizeRequest,
    Detokenized,
    Model,
    ModelList,
    StartupState,
    LiveReport,
    Status,
    Load,
    Version,
    ErrorBody,
)
BODIES = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
DESCRIBED = (SamplingFields, *BODIES, StreamOptions, StartupState)
DESCRIPTION = (
    "OpenAI-compatible API. Unknown parameters are ignored. Known ones that are not built yet are refused with a 400 "
    "unless they have their default: " + ", ".join(sorted(REFUSED)) + "."
)
Schema = dict[str, Any]


def _integer(least: int, most: int) -> Schema:
    return {"anyOf": [{"type": "integer", "minimum": least, "maximum": most}, {"type": "null"}]}


def _number(**limits: float) -> Schema:
    return {"anyOf": [{"type": "number", **limits}, {"type": "null"}]}


TOKENS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32}}
SOME_TOKENS: Schema = {**TOKENS, "minItems": 1}
TEXT_PARTS: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
}
TEXT: Schema = {"type": "string", "minLength": 1}
FIELDS: dict[str, Schema] = {
    "temperature": _number(minimum=0, maximum=2),
    "top_p": _number(exclusiveMinimum=0, maximum=1),
    "min_p": _number(minimum=0, maximum=1),
    "presence_penalty": _number(minimum=-2, maximum=2),
    "frequency_penalty": _number(minimum=-2, maximum=2),
    "repetition_penalty": _number(minimum=MIN_REPETITION_PENALTY, maximum=MAX_REPETITION_PENALTY),
    "top_k": _integer(-1, INT32),
    "n": _integer(1, MAX_N),
    "best_of": _integer(1, MAX_N),
    "seed": _integer(-INT64 - 1, INT64),
    "max_tokens": _integer(0, INT32),
    "max_completion_tokens": _integer(1, INT32),
    "min_tokens": _integer(0, INT32),
    "top_logprobs": _integer(-1, INT32),
    "prompt_logprobs": _integer(-1, INT32),
    "truncate_prompt_tokens": _integer(-1, INT32),
    "truncation_side": {"enum": ["left", "right", None]},
    "stream_interval": _integer(1, 1 << 20),
    "priority": _integer(-INT32, INT32),
    "stop": {"anyOf": [TEXT, {"type": "array", "items": TEXT, "maxItems": MAX_STOPS}, {"type": "null"}]},
    "bad_words": {"anyOf": [{"type": "array", "items": TEXT}, {"type": "null"}]},
    "stop_token_ids": {"anyOf": [TOKENS, {"type": "null"}]},
    "allowed_token_ids": {"anyOf": [SOME_TOKENS, {"type": "null"}]},
    "tokens": TOKENS,
    "logit_bias": {
        "anyOf": [
            {
                "type": "object",
                "propertyNames": {"pattern": "^[0-9]{1,6}$"},
                "additionalProperties": {"type": "number"},
            },
            {"type": "null"},
        ]
    },
}
"""Fields of bodies of which the structs say less than the server takes and checks."""
CONTENT: Schema = {"anyOf": [{"type": "string"}, TEXT_PARTS]}


def _message(roles: list[str], required: list[str], content: Schema, **more: Schema) -> Schema:
    properties = {"role": {"enum": roles}, "content": content, "name": {"type": ["string", "null"]}, **more}
    return {"type": "object", "properties": properties, "required": ["role", *required]}


CALLS: Schema = {"type": "array", "items": {"type": "object"}}
MESSAGE: Schema = {
    "anyOf": [
        _message([role for role in ROLES if role != "tool"], ["content"], CONTENT),
        _message(["tool"], ["content"], CONTENT, tool_call_id={"type": ["string", "null"]}),
        _message(["assistant"], ["tool_calls"], {"anyOf": [CONTENT, {"type": "null"}]}, tool_calls=CALLS),
    ]
}
PROMPT: Schema = {
    "anyOf": [
        TEXT,
        SOME_TOKENS,
        {"type": "array", "items": TEXT, "minItems": 1, "maxItems": MAX_CHOICES},
        {"type": "array", "items": SOME_TOKENS, "minItems": 1, "maxItems": MAX_CHOICES},
    ]
}
FIELDS_OF: dict[type[Any], dict[str, Schema]] = {
    ChatRequest: {"messages": {"type": "array", "items": MESSAGE, "minItems": 1}},
    CompletionRequest: {"prompt": PROMPT, "logprobs": _integer(-1, INT32)},
    TokenizeRequest: {"messages": {"anyOf": [{"type": "array", "items": MESSAGE, "minItems": 1}, {"type": "null"}]}},
    DetokenizeRequest: {},
}


def _ref(kind: type[Any]) -> Schema:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _json(text: str, kind: type[Any] | None = None, **more: Any) -> Schema:
    content = {"application/json": {"schema": _ref(kind) if kind is not None else {"type": "object"}}} | more
    return {"description": text, "content": content}


def _text(summary: str, kind: str, text: str = "OK") -> Schema:
    content = {kind: {"schema": {"type": "string"}}}
    return {"get": {"summary": summary, "responses": {"200": {"description": text, "content": content}}}}


def _get(summary: str, kind: type[Any] | None = None, *, failed: type[Any] | None = None) -> Schema:
    """``failed``: what a 503 has in it, if there can be one."""
    responses = {"200": _json("OK", kind)}
    if failed is not None:
        responses["503"] = _json("Not now; the message says why", failed)
    return {"get": {"summary": summary, "responses": responses}}


ERRORS = {
    "400": "Bad JSON or a bad parameter",
    "401": "Missing or wrong key",
    "403": "A web page from elsewhere, or a foreign name of this machine",
    "404": "Unknown model",
    "408": "The rest of the request did not come in time",
    "413": "Body too large",
    "415": "The body is not said to be JSON",
    "500": "The engine failed on this request",
    "503": "Not ready, draining, stopping, or the engine died",
}


def _event(kind: type[Any]) -> Schema:
    """A server-sent event, as OpenAPI 3.2 describes them: its data are JSON (an error's, too), or ``[DONE]`` last."""
    content = {"anyOf": [_ref(kind), _ref(ErrorBody)]}
    json = {"contentMediaType": "application/json", "contentSchema": content}
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, json]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _post(summary: str, body: type[Any], answer: type[Any], event: type[Any] | None = None) -> Schema:
    stream = {"text/event-stream": {"schema": _event(event)}} if event is not None else {}
    text = "The answer; with stream: true, events that end with [DONE]" if event is not None else "The answer"
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(body)}}},
            "responses": {
                "200": _json(text, answer, **stream),
                **{status: _json(text, ErrorBody) for status, text in ERRORS.items()},
            },
        }
    }


def _paths() -> Schema:
    by_id = _get("One model", Model)
    by_id["get"]["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    by_id["get"]["responses"]["404"] = _json("Unknown model", ErrorBody)
    paths = {
        "/v1/chat/completions": _post("Answer a conversation", ChatRequest, ChatCompletion, ChatChunk),
        "/v1/completions": _post("Continue a prompt", CompletionRequest, Completion, Completion),
        "/v1/models": _get("Models served here", ModelList),
        "/v1/models/{id}": by_id,
        "/tokenize": _post("Tokens of a prompt or a conversation", TokenizeRequest, Tokenized),
        "/detokenize": _post("Text of tokens", DetokenizeRequest, Detokenized),
        "/health": _get("200 if requests may be sent here", Status, failed=ErrorBody),
        "/readyz": _get("The same", Status, failed=ErrorBody),
        "/ping": _get("The same", Status, failed=ErrorBody),
        "/livez": _get("200 as long as the server's process answers", Status),
        "/startupz": _get("Phase of each process", StartupState, failed=StartupState),
        "/debug/report": _get("What every process is doing, with the stacks of all threads", LiveReport),
        "/load": _get("Requests that are being answered", Load),
        "/version": _get("Version of drumline", Version),
        "/metrics": _text("Metrics, for Prometheus", "text/plain"),
        "/openapi.json": _get("This document"),
        "/": _text("A page to chat with the model", "text/html"),
        "/docs": _text("This document, for people", "text/html"),
    }
    paths["/ping"]["post"] = paths["/ping"]["get"]
    for path in ("/v1/models", "/v1/models/{id}", "/debug/report"):
        paths[path]["get"]["responses"]["401"] = _json(ERRORS["401"], ErrorBody)
    paths["/debug/report"]["get"]["responses"]["403"] = _json("No API key, and not only this machine asks", ErrorBody)
    return paths


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
    everywhere = {name: text for kind in DESCRIBED for name, text in _attribute_docs(kind).items()}
    for kind in (*BODIES, StreamOptions, StartupState):
        properties = schemas[kind.__name__]["properties"]
        shared = _attribute_docs(SamplingFields) if issubclass(kind, SamplingFields) else {}
        docs = everywhere | shared | _attribute_docs(kind)
        for name, field in properties.items():
            own = FIELDS_OF.get(kind, {}).get(name) or (FIELDS.get(name) if kind in BODIES else None)
            if own is not None:
                field = properties[name] = {**own, **({"default": None} if "default" in field else {})}
            if name in docs:
                field["description"] = docs[name]
            elif name in REFUSED:
                field["description"] = "Not built yet: refused unless it has its default."
                field["enum"] = [None, *REFUSED[name]]
    one = {"prompt": {"type": "string"}, "messages": {"type": "array"}}
    schemas["TokenizeRequest"]["oneOf"] = [
        {"required": [name], "properties": {**{key: {"type": "null"} for key in one}, name: field}}
        for name, field in one.items()
    ]
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
