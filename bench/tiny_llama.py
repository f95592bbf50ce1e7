"""Make the random Llama of 5.0 M parameters that shows what a server costs besides arithmetic.

    python bench/tiny_llama.py FOLDER

Hidden 256, 4 layers, 8 heads, 4 KV heads, MLP 688, tied embeddings, float32, and a byte-level BPE tokenizer of 8192
tokens trained on Python's standard library. Seconds to make; a folder that has it already is left alone.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

VOCAB = 8192
CHAT = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}assistant: "


def make(folder: Path) -> Path:
    if (folder / "model.safetensors").exists() and (folder / "tokenizer.json").exists():
        return folder
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:150]
    backend.train([str(path) for path in sources], trainer)
    assert backend.get_vocab_size() == VOCAB, backend.get_vocab_size()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=CHAT)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters in {folder}")
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    make(parser.parse_args().folder)
