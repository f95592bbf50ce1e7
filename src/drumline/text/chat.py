"""Chat templates: messages to one prompt text, as ``transformers``' ``apply_chat_template`` renders them.

Templates come with models, so they are programs of somebody else. They run in jinja's immutable sandbox, see plain JSON
data only, and are bounded: jinja's own limits stop ``range(10**9)``, but neither nested loops, nor a macro that calls
itself twice, nor a text that doubles itself. So the syntax tree is changed before it is compiled: each round of a loop
and each call of a macro checks a budget of rounds and a deadline, each assignment the size of what it keeps, and each
output how much was written; operators, methods and filters that can make a long text out of a short one are checked
before they run. What was rejected: a process of its own for each rendering (costs a hundred times the rendering), and
signals (main thread only).

``apply_chat_template`` drops keys whose value is None, gives the template ``messages``, ``tools``, ``documents``,
``add_generation_prompt``, the special tokens and the caller's keywords, and knows the ``generation`` tag, ``tojson``,
``raise_exception`` and ``strftime_now``; so does this module.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
import jinja2.utils
from jinja2 import filters
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from drumline.errors import ConfigError, RequestError

MAX_CHARS = 16 << 20
"""Longest text that a template may render, and longest value that it may keep, in characters."""
MAX_ROUNDS = 1_000_000
"""Most rounds of loops and calls of macros in one rendering."""
MAX_SECONDS = 5.0
"""Longest time that one rendering may take."""
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Who may speak. Templates write any other role into the prompt as it is, or drop the message without a word."""
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_INSTEAD_OF_CONTENT = ("tool_calls", "function_call", "refusal", *_REASONING_FIELDS)


class TemplateLimitError(Exception):
    """The template did too much."""


@dataclasses.dataclass
class _Budget:
    """What one rendering may still do."""

    rounds: int
    chars: int
    deadline: float


_budget: ContextVar[_Budget | None] = ContextVar("drumline_template_budget", default=None)


def _size(value: Any) -> int:
    """Characters and items in ``value``, nested ones included; stops counting over the limit."""
    size, left = 0, [value]
    while left and size <= MAX_CHARS:
        item = left.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, dict):
            size += len(item)
            left += item.values()
        elif isinstance(item, list | tuple):
            size += len(item)
            left += item
    return size


def _fits(size: int) -> None:
    if size > MAX_CHARS:
        raise TemplateLimitError(f"a value longer than {MAX_CHARS} characters")


def _sized(value: Any) -> Any:
    """``value``, if it is no text or list that is too long."""
    if isinstance(value, str | list | tuple | dict):
        _fits(len(value))
    return value


class _Limits(jinja2.ext.Extension):
    """The calls that ``_bounded_tree`` puts into templates, and the ``generation`` tag."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """``{% generation %}`` marks what an assistant said; here only its body matters."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def tick(self, chars: int) -> str:
        """One round of a loop or call of a macro, which has ``chars`` characters of plain text in it."""
        budget = _budget.get()
        if budget is not None:
            budget.rounds -= 1
            budget.chars -= chars
            if budget.rounds < 0:
                raise TemplateLimitError(f"more than {MAX_ROUNDS} rounds of loops")
            if budget.chars < 0:
                raise TemplateLimitError(f"more than {MAX_CHARS} characters of text")
            if budget.rounds % 64 == 0 and time.monotonic() > budget.deadline:
                raise TemplateLimitError(f"more than {MAX_SECONDS:g} seconds")
        return ""

    def emit(self, value: Any) -> Any:
        """A value that is printed."""
        budget = _budget.get()
        if budget is not None:
            budget.chars -= len(value) if isinstance(value, str) else 16 + _size(value)
            if budget.chars < 0:
                raise TemplateLimitError(f"more than {MAX_CHARS} characters of text")
        return value

    def sized(self, value: Any) -> Any:
        """A value that is kept."""
        return _sized(value)

    def literal(self, value: Any) -> Any:
        """A list or dict that the template builds: nested ones can double themselves."""
        _fits(_size(value))
        return value

    def bound(self, tree: nodes.Template) -> nodes.Template:
        """Put a check into each loop, macro, assignment, literal and output of ``tree``."""
        bodies: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
        for body in bodies:
            chars = sum(len(data.data) for data in body.find_all(nodes.TemplateData))
            check = self.call_method("tick", [nodes.Const(chars)], lineno=body.lineno)
            body.body.insert(0, nodes.ExprStmt(check, lineno=body.lineno))
        for assign in tree.find_all(nodes.Assign):
            assign.node = self._wrap("literal" if isinstance(assign.node, _LITERALS) else "sized", assign.node)
        for block in tree.find_all(nodes.AssignBlock):
            block.filter = nodes.Filter(block.filter, "_sized", [], [], None, None, lineno=block.lineno)
        for output in tree.find_all(nodes.Output):
            output.nodes = [n if isinstance(n, nodes.TemplateData) else self._wrap("emit", n) for n in output.nodes]
        return tree.set_environment(self.environment)  # type: ignore[return-value]

    def _wrap(self, method: str, node: Any) -> nodes.Expr:
        return self.call_method(method, [node], lineno=node.lineno)


_LITERALS = (nodes.List, nodes.Dict, nodes.Tuple)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, with limits on what makes long texts out of short ones."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operator of a template."""
        if operator == "%" and isinstance(left, str):
            _check_format(left, right)
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    _fits((len(value) if isinstance(value, str) else _size(value) + 1) * times)
        elif isinstance(left, str | list | tuple):
            _sized(left)
            _sized(right)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > 8192:
                raise TemplateLimitError("a number that is too large")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (jinja's signature)
        """A call of a template."""
        check = _METHOD_CHECKS.get(getattr(__obj, "__name__", ""))
        text = getattr(__obj, "__self__", None)
        if check is not None and isinstance(text, str):
            check(text, *args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` as templates may call it."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text = value.__self__

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_format(text, (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return checked


def _check_format(text: str, values: Any) -> None:
    """Refuse format texts such as ``%1000000000d`` or ``{:>1000000000}``, or that repeat a long value often."""
    digits = 0
    for char in text if "%" in text or "{" in text else "":
        digits = digits + 1 if char.isdigit() else 0
        if digits > 5 or char == "*":
            raise TemplateLimitError("a format width that is too large")
    _fits(len(text) + (text.count("%") + text.count("{")) * _size(values))


def _check_width(text: str, width: Any = 0, *_: Any) -> None:
    _fits(width if isinstance(width, int) else 0)


def _check_tabs(text: str, width: Any = 8, *_: Any) -> None:
    _fits(text.count("\t") * width if isinstance(width, int) else 0)


def _check_replace(text: str, old: Any, new: Any, *_: Any) -> None:
    _fits(len(text) + text.count(str(old)) * len(str(new)))


def _check_join(glue: str, values: Any) -> None:
    if isinstance(values, str | list | tuple | dict):
        _fits(_size(values) + len(glue) * len(values))


_METHOD_CHECKS: dict[str, Callable[..., None]] = {
    "center": _check_width,
    "ljust": _check_width,
    "rjust": _check_width,
    "zfill": _check_width,
    "expandtabs": _check_tabs,
    "replace": _check_replace,
    "join": _check_join,
}


@jinja2.pass_eval_context
def _join(context: nodes.EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    values = list(value)
    _check_join(str(d), values)
    return str(filters.do_join(context, values, d, attribute))


@jinja2.pass_eval_context
def _replace(context: nodes.EvalContext, s: str, old: str, new: str, count: int | None = None) -> str:
    _check_replace(str(s), old, new)
    return filters.do_replace(context, s, old, new, count)


def _center(value: str, width: int = 80) -> str:
    _check_width(value, width)
    return filters.do_center(value, width)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    _fits(len(s) + (s.count("\n") + 1) * (width if isinstance(width, int) else len(width)))
    return str(filters.do_indent(s, width, first, blank))


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    _check_format(value, (*args, *kwargs.values()))
    return filters.do_format(value, *args, **kwargs)


def _batch(value: Any, linecount: int, fill_with: Any = None) -> Any:
    _fits(linecount)
    return filters.do_batch(value, linecount, fill_with)


def _slice(value: Any, slices: int, fill_with: Any = None) -> Any:
    _fits(slices)
    return filters.sync_do_slice(value, slices, fill_with)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without jinja's HTML escapes, as transformers writes it."""
    width = indent if isinstance(indent, int) else len(indent or "")
    _fits(_size(value) * (1 + width))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_FILTERS: dict[str, Callable[..., Any]] = {
    "join": _join,
    "replace": _replace,
    "center": _center,
    "indent": _indent,
    "format": _format,
    "batch": _batch,
    "slice": _slice,
    "tojson": _tojson,
    "_sized": _sized,
}


class _TemplateDict:
    """``dict`` as templates see it: no attributes that lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        value = dict(*args, **kwargs)
        _fits(_size(value))
        return value

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """``namespace`` as templates see it: no names with a leading underscore, no texts that are too long."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as in jinja, so that namespace(self=...) works
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _public(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _public(name)
        super().__setitem__(name, _sized(value))


def _public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template cannot keep {name!r} in a namespace")


def _raise_exception(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _make_environment() -> _Environment:
    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Limits, jinja2.ext.loopcontrols])
    env.filters.update(_FILTERS)
    for name in ("wordwrap", "urlize", "xmlattr", "pprint"):  # may blow texts up, and no chat template needs them
        env.filters.pop(name, None)
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    env.globals["dict"] = _TemplateDict()
    env.globals["namespace"] = _Namespace
    env.globals.pop("lipsum", None)
    return env


class ChatTemplate:
    """One compiled template. Thread-safe.

    Raises :class:`RequestError` if the text is no template.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        env = _make_environment()
        try:
            limits = next(extension for extension in env.extensions.values() if isinstance(extension, _Limits))
            code = env.compile(limits.bound(env.parse(text)))
            self._template = jinja2.Template.from_code(env, code, env.make_globals(None))
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(f"The chat template is wrong in line {error.lineno}: {error.message}") from error
        except (TemplateLimitError, RecursionError, SyntaxError, MemoryError, ValueError) as error:
            raise RequestError(f"The chat template cannot be compiled: {error}") from error

    def render(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of one conversation.

        ``continue_final_message`` leaves the last message open, so that the model goes on with it. ``variables`` are
        further names that the template sees, such as ``bos_token`` or ``enable_thinking``. Raises
        :class:`RequestError` if messages are wrong or the template refuses them.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: the first goes on with the last "
                "message, the second starts a new one.",
                param="continue_final_message",
            )
        chat = _plain(normalize_messages(messages))
        if continue_final_message:
            final = _open_final_message(chat)
        names = {
            **_plain(dict(variables or {})),
            "messages": chat,
            "tools": _check_list("tools", tools),
            "documents": _check_list("documents", documents),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        text = self._run(names)
        return _cut_after(text, final) if continue_final_message else text

    def _run(self, names: dict[str, Any]) -> str:
        token = _budget.set(_Budget(MAX_ROUNDS, MAX_CHARS, time.monotonic() + MAX_SECONDS))
        try:
            return self._template.render(names)
        except TemplateLimitError as error:
            raise RequestError(f"The chat template does too much: {error}.", param="messages") from error
        except (jinja2.TemplateError, RecursionError, MemoryError) as error:
            raise RequestError(f"The chat template refuses these messages: {error}", param="messages") from error
        except Exception as error:
            # A template is a program: with messages that it does not expect it raises whatever Python raises.
            what = f"{type(error).__name__}: {error}"
            raise RequestError(f"The chat template fails on these messages: {what}", param="messages") from error
        finally:
            _budget.reset(token)


def load_chat_template(given: str | Path) -> ChatTemplate:
    """The template in the file ``given``, or ``given`` itself if it is the text of one.

    Raises :class:`ConfigError` if it is neither.
    """
    text = str(given)
    if not any(mark in text for mark in ("{{", "{%", "\n")):
        try:
            text = Path(text).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template {given!s}: neither a template file nor a template: {error}") from error
    try:
        return ChatTemplate(text)
    except RequestError as error:
        raise ConfigError(f"--chat-template: {error}") from error


# ------------------------------------------------------------------------------------------------------- messages


def normalize_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as plain dicts with ``role``, and ``content`` as one text.

    Objects (pydantic models, dataclasses) become dicts, keys whose value is None are dropped, lists of text parts are
    joined with newlines, and arguments of tool calls that come as JSON text (OpenAI's form) become objects, as
    templates expect them. Raises :class:`RequestError` if something is no message.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError("messages must be a list of messages.", param="messages")
    if not messages:
        raise RequestError("messages is empty: give at least one message.", param="messages")
    return [_normalize_message(index, message) for index, message in enumerate(messages)]


def _normalize_message(index: int, given: Any) -> dict[str, Any]:
    given = _as_dict(given)
    if not isinstance(given, dict):
        raise RequestError(f"messages[{index}] must be an object with role and content.", param="messages")
    message: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError(f"messages[{index}] has no role.", param="messages")
    if role not in ROLES:
        raise RequestError(
            f"messages[{index}].role is {role[:40]!r}; it must be one of {', '.join(ROLES)}.", param="messages"
        )
    if "content" in message:
        message["content"] = _content_text(index, message["content"])
    elif role != "assistant" or not any(key in message for key in _INSTEAD_OF_CONTENT):
        # Templates would write "None", or nothing at all.
        aside = " (only an assistant with tool_calls may leave it out)" if role == "assistant" else ""
        raise RequestError(f"messages[{index}].content is missing or null: it must be a text{aside}.", param="messages")
    else:
        # Templates that know nothing of tool calls read it; those that do take "" for nothing. vLLM does the same.
        message["content"] = ""
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_parsed_arguments(call) for call in message["tool_calls"]]
    reasoning = next((message[key] for key in _REASONING_FIELDS if message.get(key) is not None), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _content_text(index: int, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"messages[{index}].content must be a text or a list of text parts.", param="messages")
    texts = []
    for place, part in enumerate(content):
        text = part
        if isinstance(part, dict):
            kind = part.get("type", "text")
            if kind not in ("text", "input_text", "output_text"):
                raise RequestError(
                    f"messages[{index}].content[{place}] has type {kind!r}: this server takes text only.",
                    param="messages",
                )
            text = part.get("text")
        if not isinstance(text, str):
            raise RequestError(f"messages[{index}].content[{place}] has no text.", param="messages")
        texts.append(text)
    return "\n".join(texts)


def _parsed_arguments(call: Any) -> Any:
    """A tool call whose ``function.arguments`` is an object, if it was JSON text."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments) if arguments.strip() else {}
            except ValueError:
                return call
            return {**call, "function": {**call["function"], "arguments": parsed}}
    return call


def _as_dict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_dict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_dict(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_as_dict(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _as_dict(getattr(value, field.name)) for field in dataclasses.fields(value)}
    dump = getattr(value, "model_dump", None)
    return _as_dict(dump()) if callable(dump) else value


def _plain(value: Any) -> Any:
    """``value`` rebuilt of exact JSON types: other objects have methods that the sandbox does not know."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value) if kind is not str else str.__str__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    dumped = _as_dict(value)
    return f"<{type(value).__name__}>" if dumped is value else _plain(dumped)


def _check_list(name: str, values: Any) -> list[Any] | None:
    if values is None:
        return None
    if not isinstance(values, list | tuple):
        raise RequestError(f"{name} must be a list of objects.", param=name)
    plain = [_plain(_as_dict(value)) for value in values]
    if not all(isinstance(value, dict) for value in plain):
        raise RequestError(f"{name} must be a list of objects.", param=name)
    return plain


def _open_final_message(chat: list[dict[str, Any]]) -> str:
    """Mark the end of the last message's content; the content without the mark."""
    final = chat[-1].get("content")
    if not isinstance(final, str) or (not final and any(key in chat[-1] for key in _INSTEAD_OF_CONTENT)):
        raise RequestError("continue_final_message: the last message has no content.", param="continue_final_message")
    chat[-1]["content"] = final + _CONTINUE_TAG
    return final


def _cut_after(text: str, final: str) -> str:
    """``text`` up to the mark that stands behind ``final``."""
    tag = _CONTINUE_TAG.strip()
    if final.strip() not in text or tag not in text:
        raise RequestError(
            "continue_final_message: the chat template drops or changes the last message, so it cannot be continued.",
            param="continue_final_message",
        )
    place = text.rindex(tag)
    keeps_spaces = text.startswith(_CONTINUE_TAG, place)
    return text[:place] if keeps_spaces else text[:place].rstrip()
