"""Chat templates render as transformers renders them, and cannot run away."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from drumline.errors import ConfigError, RequestError
from drumline.text import chat
from drumline.text.chat import ChatTemplate, load_chat_template, normalize_messages
from drumline.text.tokenizer import Tokenizer

from .vocab import CHATML, CHATS, TOOL, byte_level_folder


def test_continuing_needs_something_to_continue(byte_level: Tokenizer) -> None:
    chat_ = [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError, match="exclude each other"):
        byte_level.render_chat(chat_, add_generation_prompt=True, continue_final_message=True)
    calls = {"role": "assistant", "tool_calls": []}
    with pytest.raises(RequestError, match="has no content"):
        byte_level.render_chat([calls], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(RequestError, match="drops or changes"):
        ChatTemplate("nothing").render(chat_, continue_final_message=True)


# ----------------------------------------------------------------------------------------------------------- messages


def test_content_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert normalize_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "a\nb"}]


def test_objects_none_and_tool_arguments() -> None:
    @dataclasses.dataclass
    class Message:
        role: str
        content: str | None
        name: str | None = None

    class Model:
        def model_dump(self) -> dict[str, Any]:
            return {"role": "tool", "content": "x", "tool_call_id": None}

    call = {"function": {"name": "f", "arguments": '{"a": [1]}'}}
    bad = {"function": {"name": "f", "arguments": "{no json"}}
    found = normalize_messages(
        [Message("user", "hi"), Model(), {"role": "assistant", "content": None, "tool_calls": [call, bad]}]
    )
    assert found == [
        {"role": "user", "content": "hi"},
        {"role": "tool", "content": "x"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1]}}}, bad], "content": ""},
    ]


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "empty"),
        ("hello", "list of messages"),
        ({"role": "user"}, "list of messages"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\] has no role"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content must be"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url.*text only"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\] has no text"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content is missing or null"),
        ([{"role": "user", "content": "x"}, {"role": "system"}], r"messages\[1\]\.content is missing or null"),
        ([{"role": "assistant", "content": None}], r"messages\[0\]\.content is missing.*with tool_calls may"),
        ([{"role": "wizard", "content": "x"}], r"messages\[0\]\.role is 'wizard'; it must be one of system, developer"),
    ],
)
def test_bad_messages_are_told(byte_level: Tokenizer, messages: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=problem) as caught:
        byte_level.render_chat(messages)
    assert caught.value.param == "messages"


def test_bad_tools_are_told(byte_level: Tokenizer) -> None:
    for tools in ("x", [1], {"a": 1}):
        with pytest.raises(RequestError, match="tools must be"):
            byte_level.render_chat(CHATS[0], tools=tools)  # type: ignore[arg-type]


def test_objects_in_variables_are_made_harmless() -> None:
    template = ChatTemplate("{{ x }} {{ y }}")
    assert template.render(CHATS[0], variables={"x": threading_like(), "y": True}) == "<Dangerous> True"


def threading_like() -> Any:
    class Dangerous:
        def __str__(self) -> str:
            raise AssertionError("called")

    return Dangerous()


# ---------------------------------------------------------------------------------------------------------- templates


def test_template_by_file_and_by_text(tmp_path: Path, byte_level_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    for given in (str(file), "{% for m in messages %}<{{ m.content }}>{% endfor %}"):
        tokenizer = Tokenizer.from_folder(byte_level_path, chat_template=given)
        assert tokenizer.render_chat(CHATS[1][:2]) == '<Be brief & "kind" <b>><Hi\n there>'
    with pytest.raises(ConfigError, match="neither a template file nor a template"):
        load_chat_template(str(tmp_path / "missing.jinja"))
    with pytest.raises(ConfigError, match="line 1"):
        load_chat_template("{% for %}")


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path / "a", chat_template=named))
    assert tokenizer.render_chat(CHATS[0]) == "plain"
    assert tokenizer.render_chat(CHATS[0], tools=[TOOL]) == "tools"
    assert tokenizer.render_chat(CHATS[0], chat_template="tool_use") == "tools"
    (tmp_path / "a" / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_folder(tmp_path / "a").render_chat(CHATS[0]) == "from the file"


def test_model_without_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path / "a", chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no default chat template"):
        tokenizer.render_chat(CHATS[0])


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{% include 'x' %}",
        "{{ 1 / 0 }}",
        "{{ messages[0].foo.bar }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace(__x=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_bad_templates_are_the_requests_fault(template: str) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(template).render(CHATS[0])


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) if n else '' }}{{ f(n - 1) if n else '' }}{% endmacro %}{{ f(40) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(50) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(50) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(50) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(50) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}",
        "{% set x %}{% for i in range(90000) %}{{ 'a' * 100000 }}{% endfor %}{% endset %}",
        "{% set x %}{% for i in range(90000) %}" + "x" * 10000 + "{% endfor %}{% endset %}",
        "{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ [1] * 10 ** 9 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ ('%s' * 10000) % ('a' * 100000,) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ 'a'.center(10 ** 9) }}",
        "{{ 'a'|center(1000000000) }}",
        "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
        "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
        "{{ ('a' * 100000).join('b' * 100000) }}",
        "{{ range(90000)|map('string')|join('b' * 60000) }}",
        "{{ ('a\n' * 100000)|indent(100000) }}",
        "{{ 'a'|batch(1000000000, 'x')|list }}",
        "{{ messages|tojson(indent=1000000000) }}",
    ],
)
def test_runaway_templates_are_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.5)
    monkeypatch.setattr(chat, "MAX_CHARS", 1 << 20)
    start = time.monotonic()
    with pytest.raises(RequestError, match="does too much"):
        ChatTemplate(template).render(CHATS[0])
    assert time.monotonic() - start < 5


def test_long_conversations_are_no_runaway() -> None:
    conversation = [{"role": "user", "content": "word " * 2000}] * 200
    text = ChatTemplate(CHATML).render(conversation)
    assert len(text) > 200 * 10000
