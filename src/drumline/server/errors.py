"""Errors as OpenAI's clients expect them: ``{"error": {"message", "type", "param", "code"}}``.

Whatever a client sends ends in one of these and never in a 500; a 500 is a fault of drumline and says no more than
that, since tracebacks are for the log.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.responses import Response

from drumline.errors import DrumlineError, FailedError, RequestError, shown


class ErrorDetail(msgspec.Struct, kw_only=True):
    """The inner object of an error answer."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorBody(msgspec.Struct, kw_only=True):
    """The whole error answer."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer other than 2xx; raised anywhere below a route."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(message=message, type=type, param=param, code=code)
        self.headers = headers or {}

    def body(self) -> bytes:
        """JSON of the answer."""
        return msgspec.json.encode(ErrorBody(error=self.detail))

    def response(self) -> Response:
        """The answer."""
        return Response(self.body(), self.status, self.headers, "application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the client has to change something."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, *, retry_after: int | None = None) -> ApiError:
    """503: not now. ``retry_after`` in seconds."""
    headers = {"retry-after": str(retry_after)} if retry_after is not None else None
    return ApiError(503, message, type="service_unavailable", code="service_unavailable", headers=headers)


def internal(message: str = "Internal error; the server's log has the details.") -> ApiError:
    """500: our fault."""
    return ApiError(500, message, type="server_error", code="internal_error")


def engine_dead(error: FailedError) -> ApiError:
    """503 for a request whose engine died. Only the headline: tracebacks and paths are not the client's business."""
    return unavailable(f"The engine died: {error.report.headline()}")


def as_api_error(error: BaseException) -> ApiError | None:
    """The answer to an exception that a route let through; None if it is a fault of drumline."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return bad_request(str(error), error.param, error.code)
    if isinstance(error, FailedError):
        return engine_dead(error)
    if isinstance(error, DrumlineError):
        # The engine failed on this one request and says why.
        return ApiError(500, str(error), type="server_error", code="request_failed")
    return None


_ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
"""An escape in JSON; with a group if it is half of a surrogate pair."""


_STEPS = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
"""A name or a place in msgspec's path."""
MAX_LOOKED_INTO = 1 << 16
"""Bytes of a body that is read once more to tell what is wrong in it."""


def _value_at(path: str | None, body: bytes) -> str:
    """``: `` and the value that msgspec names by its path; nothing where there is none."""
    if path is None or "[...]" in path or len(body) > MAX_LOOKED_INTO:
        return ""
    try:
        value = msgspec.json.decode(body)
        for step in _STEPS.finditer(path):
            value = value[step[1] or int(step[2])]
    except (msgspec.MsgspecError, UnicodeError, RecursionError, LookupError, TypeError):
        return ""
    return f": {shown(value)}"


def decode_error(error: Exception, body: bytes = b"") -> ApiError:
    """400 for a body that msgspec could not take."""
    if isinstance(error, msgspec.ValidationError):
        message, param = str(error), None
        if " - at `" in message:
            message, _, path = message.rpartition(" - at `")
            param = path.rstrip("`").removeprefix("$").lstrip(".") or None
        if param is None and message.startswith("Object missing required field `"):
            param = message.split("`")[1]
        where = f"{param}: " if param else "body: "
        return bad_request(where + message + _value_at(param, body), param)
    if isinstance(error, RecursionError):
        return bad_request("The body is not acceptable JSON: it is nested too deeply.", code="invalid_json")
    # msgspec calls such a text truncated or malformed.
    if half := next((match[1] for match in _ESCAPES.finditer(body) if match[1]), None):
        reason = f"\\{half.decode()} is half of a surrogate pair, which stands for no character"
        return bad_request(f"The body is not acceptable JSON: {reason}.", code="invalid_json")
    return bad_request(f"The body is not valid JSON: {error}", code="invalid_json")


def openapi_schema() -> dict[str, Any]:
    """JSON schema of the error answer."""
    return msgspec.json.schema(ErrorBody)
