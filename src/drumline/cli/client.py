"""A small client of drumline's own API over the standard library: what ``chat`` needs and no more.

Closing the connection is how a client stops an answer; the server frees the request then.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

CONNECT_S = 10.0
"""How long a server may take to accept a connection. Answers may take any time; ctrl-C ends them."""


class ServerError(Exception):
    """No server, or it refused. The message is for the user."""


class Client:
    """Talks to one server. ``answer_s``: how long it may be silent while it answers; None: any time."""

    def __init__(self, url: str, api_key: str = "", answer_s: float | None = None) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            raise ServerError(f"{url}: not a URL") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"{url}: not a URL such as http://127.0.0.1:8000")
        self.url = url
        self._answer_s = answer_s
        self._parts = parts
        self._port = port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> Any:
        """JSON of a GET, whatever the status; ServerError if nobody answers."""
        with self._connected() as connection:
            connection.request("GET", self._prefix + path, headers=self._headers)
            return self._json(connection.getresponse())

    def models(self) -> list[str]:
        """Names of the models served there."""
        answer = self.get("/v1/models")
        if said := _error_of(answer):
            raise ServerError(said)
        try:
            return [str(entry["id"]) for entry in answer["data"]]
        except (TypeError, KeyError):
            raise ServerError(f"{self.url} answers, but not as a server of the OpenAI API") from None

    def chat(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Events of a streamed answer. Close the iterator to stop the answer."""
        with self._connected() as connection:
            data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
            connection.request("POST", self._prefix + "/v1/chat/completions", data, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                answer = self._json(response)
                raise ServerError(_error_of(answer) or f"HTTP {response.status}")
            yield from self._events(response)

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        for line in response:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                return
            try:
                event = json.loads(data)
            except (ValueError, RecursionError):
                event = None
            if not isinstance(event, dict):
                raise ServerError(f"the server at {self.url} sends events that are no JSON objects")
            if said := _error_of(event):
                raise ServerError(said)
            yield event
        raise ServerError("the answer broke off: the server went away")

    @contextmanager
    def _connected(self) -> Iterator[http.client.HTTPConnection]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._port, timeout=CONNECT_S)
        try:
            try:
                _aside(connection.connect)
            except (OSError, UnicodeError) as e:  # a name that cannot be one
                why = getattr(e, "strerror", None) or e
                raise ServerError(f"no server answers at {self.url} ({why}). Start one with: drumline serve") from None
            connection.sock.settimeout(self._answer_s)
            yield connection
        except TimeoutError:
            raise ServerError(f"the server at {self.url} has said nothing for {self._answer_s:g} s") from None
        except (http.client.HTTPException, ConnectionError) as e:
            raise ServerError(f"the server at {self.url} went away ({type(e).__name__})") from None
        finally:
            connection.close()

    def _json(self, response: http.client.HTTPResponse) -> Any:
        data = response.read()
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise ServerError(f"{self.url} answers, but not as a drumline server (HTTP {response.status})") from None


def _error_of(answer: Any) -> str:
    """What an answer says that went wrong; empty: it says nothing of the kind."""
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error or "")


def _aside(work: Callable[[], None]) -> None:
    """Do ``work`` in a thread and wait, since ctrl-C does not interrupt the look-up of a host's name."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as e:  # noqa: BLE001 - raised again by whoever waits
            errors.append(e)

    thread = threading.Thread(target=run, name="drumline-connect", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
