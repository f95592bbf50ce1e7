"""``drumline chat``: talk to a running server. Ctrl-C ends an answer, ctrl-D the conversation."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from drumline.cli.args import Parser, parse
from drumline.cli.client import Client, ServerError
from drumline.errors import ExitCode

HELP = "ctrl-C ends an answer, ctrl-D the conversation; /clear forgets it."


def main(argv: Sequence[str]) -> int:
    """Run ``drumline chat``."""
    options = parse(_parser(), argv)
    try:
        client = Client(options.server or options.url, options.api_key)
        model = options.model or client.models()[0]
        chat = Conversation(client, model, options.system, _sampling(options))
        if options.message is not None or not sys.stdin.isatty():
            return _once(chat, sys.stdin.read() if options.message is None else options.message)
        return _talk(chat)
    except ServerError as e:
        print(f"drumline chat: {e}", file=sys.stderr)
        return ExitCode.FAILED


def _parser() -> Parser:
    parser = Parser(prog="drumline chat", description=f"Talk to a running server. {HELP}")
    url = os.environ.get("DRUMLINE_URL", "http://127.0.0.1:8000")
    key = os.environ.get("DRUMLINE_API_KEY", "")
    parser.add_argument("server", nargs="?", metavar="URL", help=f"the server ({url}; $DRUMLINE_URL)")
    parser.add_argument("--url", default=url, metavar="URL", help="the same as URL")
    parser.add_argument("-m", "--message", metavar="TEXT", help="say this, print the answer, end (or pipe it in)")
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    parser.add_argument("--model", default="", metavar="NAME", help="one of the server's models (the first)")
    parser.add_argument("--temperature", type=float, metavar="X", help="0: always the likeliest token")
    parser.add_argument("--top-p", type=float, metavar="X", help="share of the likeliest tokens to choose from")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    parser.add_argument("--seed", type=int, metavar="N", help="same seed, same answer")
    parser.add_argument("--api-key", default=key, metavar="KEY", help="the server's key ($DRUMLINE_API_KEY)")
    return parser


def _sampling(options: Any) -> dict[str, Any]:
    names = ("temperature", "top_p", "max_tokens", "seed")
    return {name: value for name in names if (value := getattr(options, name)) is not None}


class Conversation:
    """Messages so far."""

    def __init__(self, client: Client, model: str, system: str, sampling: dict[str, Any]) -> None:
        self.client = client
        self.model = model
        self._sampling = sampling
        self._first = [{"role": "system", "content": system}] if system else []
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system prompt."""
        self._messages: list[dict[str, str]] = list(self._first)

    def say(self, text: str) -> str:
        """Print the answer as it comes; one line on its speed, for printing. Ctrl-C ends the answer early.

        What was said of an answer that was ended stays in the conversation; after an error the question is taken back.
        """
        self._messages.append({"role": "user", "content": text})
        parts: list[str] = []
        note = ""
        try:
            note = self._stream(parts)
        except KeyboardInterrupt:
            note = "stopped"
        except ServerError:
            self._messages.pop()
            raise
        finally:
            print(flush=True)
        if parts:
            self._messages.append({"role": "assistant", "content": "".join(parts)})
        else:
            self._messages.pop()
        return note

    def _stream(self, parts: list[str]) -> str:
        began, first, usage = time.monotonic(), 0.0, None
        body = {"model": self.model, "messages": self._messages, **self._sampling}
        with contextlib.closing(self.client.chat(body)) as events:  # type: ignore[type-var]
            for event in events:
                usage = event.get("usage") or usage
                text = event["choices"][0]["delta"].get("content") if event["choices"] else None
                if text:
                    first = first or time.monotonic()
                    parts.append(text)
                    print(text, end="", flush=True)
        return _speed(began, first, time.monotonic(), usage["completion_tokens"] if usage else 0)


def _speed(began: float, first: float, last: float, tokens: int) -> str:
    rate = f", {(tokens - 1) / (last - first):.1f} tokens/s" if tokens > 1 and last > first else ""
    return f"{tokens} tokens, first after {(first - began) * 1000:.0f} ms{rate}" if tokens and first else ""


def _once(chat: Conversation, text: str) -> int:
    if not text.strip():
        print("drumline chat: nothing to say", file=sys.stderr)
        return ExitCode.USAGE
    return ExitCode.INTERRUPTED if chat.say(text) == "stopped" else ExitCode.OK


def _talk(chat: Conversation) -> int:
    # Line editing and the arrow keys, where Python was built with them.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401

    print(f"{chat.model} at {chat.client.url}. {HELP}")
    while True:
        try:
            text = input("\n> ").strip()
        except EOFError:
            print()
            return ExitCode.OK
        except KeyboardInterrupt:
            print()
            continue
        if text == "/clear":
            chat.clear()
        elif text in ("/exit", "/quit"):
            return ExitCode.OK
        elif text:
            try:
                note = chat.say(text)
            except ServerError as e:
                note = str(e)
            if note:
                print(f"\033[2m[{note}]\033[0m" if sys.stdout.isatty() else f"[{note}]")
