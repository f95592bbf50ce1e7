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
