"""The tokenizer of a Hugging Face folder, over the ``tokenizers`` library alone.

``transformers.AutoTokenizer`` imports torch and takes seconds; for a folder with a ``tokenizer.json`` it adds little
to it: which special tokens there are, tokens that only ``tokenizer_config.json`` knows of, the chat template. That is
done here, with the same results. Whether a beginning-of-sequence token is put in front is the post-processor's matter,
which is part of ``tokenizer.json``; ``add_bos_token`` in the configuration is ignored beside it, as transformers does.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from drumline.errors import ConfigError, RequestError
from drumline.plan.sampling import SamplingParams
from drumline.text.bounds import FewestTokens
from drumline.text.chat import ChatTemplate, load_chat_template
from drumline.text.spelling import byte_table

logger = logging.getLogger(__name__)

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SHORT_CHARS = 4096
"""Texts up to this length are tokenised in a millisecond or two. Longer ones belong into a thread."""
_SAMPLING_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


class Tokenizer:
    """Text to token ids and back. Thread-safe; made by :meth:`from_folder`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Sequence[int] = (),
        templates: Mapping[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self.backend = backend
        """The object of the ``tokenizers`` library."""
        self.special_tokens = dict(special_tokens)
        """Such as ``{"bos_token": "<s>"}``; chat templates see these names."""
        eos = self.token_to_id(self.eos_token)
        self.eos_token_ids = tuple(dict.fromkeys([*([] if eos is None else [eos]), *eos_token_ids]))
        """All tokens that end an output."""
        self._templates = dict(templates or {})
        self._given_template = chat_template
        self._byte_of = byte_table(backend)

    @classmethod
    def from_folder(cls, path: str | Path, chat_template: str = "") -> Tokenizer:
        """The tokenizer of a local folder.

        ``chat_template`` (a file, or a template's text) replaces the folder's. Raises :class:`ConfigError` if the
        folder has no tokenizer that can be used.
        """
        folder = Path(path)
        backend = _load_backend(folder)
        config = _read_json(folder / "tokenizer_config.json")
        special = _add_tokens(backend, config, folder)
        return cls(
            backend,
            special_tokens=special,
            eos_token_ids=read_eos_token_ids(folder),
            templates=_read_templates(folder, config),
            chat_template=load_chat_template(chat_template) if chat_template else None,
        )

    # ---------------------------------------------------------------------------------------------------- tokens

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def bos_token(self) -> str | None:
        """Text of the token that begins a sequence, if there is one."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """Text of the tokenizer's own end-of-sequence token."""
        return self.special_tokens.get("eos_token")

    @functools.cached_property
    def bos_token_id(self) -> int | None:
        """Token that begins a sequence, if there is one."""
        return self.token_to_id(self.bos_token)

    @functools.cached_property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end-of-sequence token; all that end an output: ``eos_token_ids``."""
        return self.token_to_id(self.eos_token)

    @functools.cached_property
    def pad_token_id(self) -> int | None:
        """Token that fills up, if there is one."""
        return self.token_to_id(self.special_tokens.get("pad_token"))

    @functools.cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that ``skip_special_tokens`` leaves out."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    def token_to_id(self, token: str | None) -> int | None:
        """Id of a token, None if there is no such token."""
        return None if token is None else self.backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token, None if there is no such token."""
        return self.backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, in bytes: a token may be a part of a character only."""
        token = self.backend.id_to_token(token_id)
        return b"" if token is None else self._byte_of(token)

    def token_text(self, token_id: int) -> str:
        """What one token stands for as text; a part of a character gives U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    # ------------------------------------------------------------------------------------------------------ text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Raises :class:`RequestError` for what is no text."""
        return list(self.encoding(text, add_special_tokens).ids)

    def encoding(self, text: str, add_special_tokens: bool = True) -> tokenizers.Encoding:
        """The same before it is made a list, which takes its time: ``len()`` of it is the number of tokens."""
        if not isinstance(text, str):
            raise RequestError(f"A prompt must be a text, got {type(text).__name__}.", param="prompt")
        try:
            if len(text) <= SHORT_CHARS or threading.current_thread() is threading.main_thread():
                return self.backend.encode(text, add_special_tokens=add_special_tokens)
            # The only call of the library that lets other threads run meanwhile. (In the main thread nobody waits, and
            # it may start threads of its own.)
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except (UnicodeError, TypeError) as error:
            raise RequestError("The prompt has a lone surrogate in it, which is no text.", param="prompt") from error

    @functools.cached_property
    def fewest_tokens(self) -> FewestTokens | None:
        """How few tokens a text can have; None if that is not known. Takes a tenth of a second the first time."""
        return FewestTokens.of(self.backend)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Ids outside of the vocabulary give nothing."""
        try:
            # Of a batch, so that other threads run meanwhile.
            return self.backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]
        except (OverflowError, TypeError) as error:
            raise RequestError("Token ids must be integers that are not negative.", param="token_ids") from error

    # ------------------------------------------------------------------------------------------------------ chat

    @property
    def has_chat_template(self) -> bool:
        """There is a template for conversations."""
        return self._given_template is not None or bool(self._templates)

    def chat_template(self, tools: bool = False) -> ChatTemplate:
        """The template for conversations (``tools``: with tools). RequestError if the model has none."""
        if self._given_template is not None:
            return self._given_template
        for name in ("tool_use", "default") if tools else ("default",):
            if name in self._templates:
                return _compiled(self._templates[name])
        have = f" (it has: {', '.join(sorted(self._templates))})" if self._templates else ""
        raise RequestError(
            f"This model has no default chat template{have}: give one with --chat-template, or use completions.",
            param="messages",
        )

    def render_chat(
        self,
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | ChatTemplate | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation, as ``apply_chat_template(tokenize=False)`` gives it.

        ``kwargs`` are further variables of the template, such as ``enable_thinking``. Encode the text with
        ``add_special_tokens=False``: the template writes them itself.
        """
        if isinstance(chat_template, str):
            template = _compiled(self._templates.get(chat_template, chat_template))
        else:
            template = chat_template or self.chat_template(tools=bool(tools))
        return template.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self.special_tokens, **kwargs},
        )

    def encode_chat(self, messages: Sequence[Any], **kwargs: Any) -> list[int]:
        """Token ids of a conversation; keywords as :meth:`render_chat`."""
        return self.encode(self.render_chat(messages, **kwargs), add_special_tokens=False)

    def apply_chat_template(
        self, conversation: Sequence[Any], *, tokenize: bool = True, add_generation_prompt: bool = False, **kwargs: Any
    ) -> str | list[int]:
        """Text or token ids of a conversation, under the name and with the defaults that transformers' users know."""
        text = self.render_chat(conversation, add_generation_prompt=add_generation_prompt, **kwargs)
        return self.encode(text, add_special_tokens=False) if tokenize else text


@functools.lru_cache(maxsize=16)
def _compiled(text: str) -> ChatTemplate:
    return ChatTemplate(text)


# ---------------------------------------------------------------------------------------------- reading the folder


def read_eos_token_ids(folder: str | Path) -> tuple[int, ...]:
    """Ids of generation_config.json that end an output, or else those of config.json."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(Path(folder) / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        ids = [token for token in ids if isinstance(token, int) and not isinstance(token, bool)]
        if ids:
            return tuple(ids)
    return ()


def read_sampling_defaults(folder: str | Path) -> dict[str, Any]:
    """Defaults of SamplingParams that generation_config.json gives, as vLLM takes them.

    ConfigError if one of them cannot work: every request that does not give its own would fail.
    """
    path = Path(folder) / "generation_config.json"
    config = _read_json(path)
    found = {ours: config.get(theirs) for theirs, ours in _SAMPLING_DEFAULTS.items()}
    given = {name: value for name, value in found.items() if value is not None}
    try:
        SamplingParams(**given)
    except RequestError as error:
        raise ConfigError(f"{path}: {error}") from None
    return given


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: is no JSON object")
    return value


def tokenizer_file(folder: str | Path) -> Path:
    """The file that a folder's tokenizer is in. ConfigError if there is none that can be read."""
    folder = Path(folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder")
        others = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (folder / name).exists()]
        hint = f" There is a {others[0]}, but only tokenizer.json can be read." if others else ""
        raise ConfigError(
            f"{folder}: has no tokenizer.json.{hint} Save it with AutoTokenizer.from_pretrained(...)"
            ".save_pretrained(folder), give another folder with --tokenizer, or skip the tokenizer "
            "(--skip-tokenizer-init) and send token ids."
        )
    return file


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    file = tokenizer_file(folder)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        # The library raises plain Exception for whatever is wrong in the file.
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], folder: Path) -> dict[str, str]:
    """Add tokens that only the configuration knows of; the special tokens by name."""
    named: dict[str, Any] = dict(config)
    if "added_tokens_decoder" not in config:
        named |= _read_json(folder / "special_tokens_map.json")
    special = {key: text for key in SPECIAL_TOKENS if (text := _content(named.get(key))) is not None}
    extra = {k: t for k, v in named.items() if k.endswith("_token") and k not in special and (t := _content(v))}
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    decoder = config.get("added_tokens_decoder") or {}
    new = [
        _added_token(spec, spec["content"] in special.values())
        for _, spec in sorted(decoder.items(), key=lambda item: int(item[0]))
        if isinstance(spec, dict) and spec.get("content") not in known
    ]
    listed = named.get("additional_special_tokens") or named.get("extra_special_tokens") or []
    texts = [*special.values(), *extra.values(), *(_content(token) for token in listed if isinstance(listed, list))]
    known |= {token.content for token in new}
    new += [tokenizers.AddedToken(text, special=True) for text in dict.fromkeys(texts) if text and text not in known]
    if new:
        backend.add_tokens(new)
    return {**special, **extra}


def _content(token: Any) -> str | None:
    """Text of a special token, which is written as a text or as an object with ``content``."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _added_token(spec: Mapping[str, Any], named: bool) -> tokenizers.AddedToken:
    flags = {key: bool(spec[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in spec}
    return tokenizers.AddedToken(spec["content"], special=bool(spec.get("special")) or named, **flags)


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; files win over the configuration."""
    templates: dict[str, str] = {}
    inside = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(inside, str):
        templates["default"] = inside
    elif isinstance(inside, list):
        templates |= {entry["name"]: entry["template"] for entry in inside if {"name", "template"} <= set(entry)}
    elif isinstance(inside, dict):
        templates |= {str(name): str(text) for name, text in inside.items()}
    files = {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        templates = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    return templates
