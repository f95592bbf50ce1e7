"""Small tokenizers of the two kinds that models have, trained on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on in the sun.",
    "Paris is the capital of France; 東京 is the capital of Japan. Numbers: 0 1 2 3 42 1999.",
    "def main():\n    print('hello, world')\n\nif __name__ == '__main__':\n    main()\n",
    "Ein Käse, zwei Brötchen, drei Äpfel. Привет, мир! 你好 世界 🎉🚀",
    "system user assistant You are a helpful assistant named nobody in particular",
]
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TOOLS_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "system" and loop.first %}{% continue %}{% endif %}
    {%- if message.role == "user" or message.role == "system" %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content or '' %}
        {%- generation %}
        {{- '<|im_start|>' + message.role + '\\n' + content.lstrip('\\n') }}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
                {{- tool_call.arguments | tojson }}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role == "tool" %}
        {{- '<tool_response>\\n' + message.content + '\\n</tool_response>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
STRICT_TEMPLATE = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""
MACRO_TEMPLATE = """\
{%- macro turn(role, text) -%}[{{ role|upper }}] {{ text|default('-', true)|replace('\\n', ' / ') }}{%- endmacro -%}
{%- set names = {'user': 'U', 'assistant': 'A', 'system': 'S'} -%}
{%- for m in messages -%}
{{ turn(names.get(m.role, m.role), m.content) }}{{ ', '.join(['x', 'y']) if loop.last else ' | ' }}
{%- if loop.index > 30 %}{% break %}{% endif -%}
{%- endfor -%}
{{ '%s-%d' % (messages|length, 3) }} {{ "{:>4}".format(messages|length) }} {{ strftime_now('%Y') }}
{{ dict(a=1, b=[1, 2])|tojson(indent=2) }} {{ documents|length if documents else 'none' }}
{{ messages|map(attribute='role')|join('+') }} {{ ('ab' * 3) ~ 4 }} {{ 2 ** 10 + 7 % 4 }}
"""
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": 'Be brief & "kind" <b>'},
        {"role": "user", "content": "Hi\n there"},
        {"role": "assistant", "content": "Hello 🎉"},
        {"role": "user", "content": "東京?"},
    ],
    [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "get", "arguments": {"city": "Paris", "n": 1}}}],
        },
        {"role": "tool", "content": "sunny"},
    ],
]
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {"é": {}}}}}


def byte_level_folder(folder: Path, vocab_size: int = 420, **config: Any) -> Path:
    """Byte-level BPE with ChatML tokens, as SmolLM2 and Qwen have it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    settings = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "chat_template": CHATML,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return save(folder, backend, settings | config)


def byte_fallback_folder(folder: Path, vocab_size: int = 400, **config: Any) -> Path:
    """BPE with byte fallback, spaces as ▁ and a beginning-of-sequence token, as Llama 2 has it."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    alphabet = [chr(code) for code in range(0x20, 0x7F)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        initial_alphabet=[*alphabet, "▁"],
        limit_alphabet=len(alphabet) + 1,
        show_progress=False,
    )
    backend.train_from_iterator([TEXTS[0], TEXTS[2], TEXTS[4]], trainer)
    # The trainer makes byte tokens special; in real vocabularies they are not.
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return save(folder, backend, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | config)


def save(folder: Path, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def special(text: str) -> AddedToken:
    return AddedToken(text, special=True)
