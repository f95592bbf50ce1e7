"""From what the user named to a local folder that can be loaded. No torch, no transformers.

=============================  ===================================================================================
name                           folder
=============================  ===================================================================================
empty                          the embedded default model, converted into the user's cache at first use
a folder                       itself
``owner/name`` or ``name``     the hub's snapshot: configuration first (an unsupported model costs no download), then
                               safetensors and tokenizer files only. HF_TOKEN, HF_HUB_OFFLINE, HF_HOME are heeded
=============================  ===================================================================================

Everything that cannot work raises ConfigError before any worker process is started, with what to do about it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline.config import ModelConfig
from drumline.errors import ConfigError
from drumline.model import default_model
from drumline.model.progress import ConsoleProgress, Progress
from drumline.model.spec import read_spec

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_TOKENIZER_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
_WEIGHT_FILES = ["*.safetensors"]
INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000
"""Longest header of a safetensors file in bytes, as its readers have it."""
_HEADS, _EMBEDDINGS = _TIED = (
    ("lm_head.weight", "embed_out.weight"),
    ("model.embed_tokens.weight", "gpt_neox.embed_in.weight", "embed_tokens.weight", "embed_in.weight"),
)
"""What checkpoints call them."""
_COMPARED_AT_ONCE = 1 << 20
CONNECT_S = 10.0
"""How long the hub may take to answer the first question."""
_IGNORED = ["*/*", "consolidated*"]
"""Subfolders (other formats) and copies of the weights in the vendor's own format."""


def resolve(config: ModelConfig, progress: Progress | None = None) -> ModelConfig:
    """The configuration with ``path`` (and ``tokenizer``, if it was given) set to local folders that were checked.

    ``progress`` gets texts and fractions while something is fetched or converted; by default a bar on stderr.
    Raises ConfigError, or UnsupportedModelError for a model that cannot be served.
    """
    if config.load_format not in ("auto", "safetensors", "dummy"):
        raise ConfigError(f"--load-format {config.load_format} is unknown; use auto, safetensors or dummy")
    progress = progress or ConsoleProgress()
    weights = config.load_format != "dummy"
    if not config.model:
        path = _default(progress)
    else:
        path = _folder(config.model, config.revision, weights=weights, option="the model")
    read_spec(path)
    if weights:
        check_weights(path)
    tokenizer = config.tokenizer and str(_folder(config.tokenizer, None, weights=False, option="--tokenizer"))
    return replace(config, path=str(path), tokenizer=tokenizer)


def check_weights(folder: Path) -> None:
    """ConfigError if weights are missing or incomplete, by file sizes and headers: no tensor is read."""
    index = folder / INDEX
    if index.exists():
        files = _indexed(index)
        if missing := [name for name in files if not (folder / name).exists()]:
            raise ConfigError(f"{folder} lacks {', '.join(missing)}, which its index names: was it fetched completely?")
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    for name in files:
        _check_file(folder / name)
    if files:
        return
    others = sorted({path.name for suffix in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(suffix)})
    hint = f"; {', '.join(others[:3])} cannot be read, convert the model to safetensors" if others else ""
    raise ConfigError(f"{folder} has no weights (*.safetensors){hint}. --load-format dummy needs none")


def _indexed(index: Path) -> list[str]:
    """Names of the files that an index lists."""
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if strange := [name for name in files if not isinstance(name, str)]:
            raise TypeError(f"{strange[0]!r} is no name of a file")
        return sorted(files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} cannot be read as an index of safetensors: {error!r}") from error


def _check_file(path: Path) -> None:
    """ConfigError if a safetensors file is not as long as its header says."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            # A file that is cut within its header has a length that points beyond its end.
            header = json.loads(file.read(length)) if 8 + length <= size and length <= _LONGEST_HEADER else None
        if header is None:
            raise ValueError("it is truncated, or no such file")
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error
    if whole != size:
        raise ConfigError(f"{path} has {size} bytes, but {whole} by its header: was it fetched completely?")


def has_own_head(folder: Path) -> bool:
    """The weights have both an embedding and a head, and these are not the same bytes: then they are two tensors,
    whatever the configuration says (``loader``). False for weights that cannot be read."""
    try:
        found: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length)) if length <= _LONGEST_HEADER else {}
            found |= {name: (path, 8 + length, header[name]) for name in (*_HEADS, *_EMBEDDINGS) if name in header}
        head, embedding = (next((found[name] for name in names if name in found), None) for names in _TIED)
        return head is not None and embedding is not None and _differ(head, embedding)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return False


def _differ(*tensors: tuple[Path, int, dict[str, Any]]) -> bool:
    """Whether two tensors (file, where its data begin, entry in its header) differ."""
    (one, at_one, first), (other, at_other, second) = tensors
    (start_one, end_one), (start_other, end_other) = first["data_offsets"], second["data_offsets"]
    size = end_one - start_one
    if (first["dtype"], size) != (second["dtype"], end_other - start_other):
        return True
    with one.open("rb") as file, other.open("rb") as beside:
        file.seek(at_one + start_one)
        beside.seek(at_other + start_other)
        return any(
            file.read(count) != beside.read(count)
            for count in (min(_COMPARED_AT_ONCE, size - done) for done in range(0, size, _COMPARED_AT_ONCE))
        )


def _folder(name: str, revision: str | None, *, weights: bool, option: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise ConfigError(f"{option} {name} is a file; name the folder that holds config.json and *.safetensors")
    if name.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"{option} {name}: there is no such folder")
    return _snapshot(name, revision, weights=weights)


# --- the default model -----------------------------------------------------------------------------------------------


def _default(progress: Progress) -> Path:
    """Folder of the default model; made in a process of its own where it is not there yet."""
    folder = default_model.default_folder()
    if folder.is_dir():
        return folder
    command = [sys.executable, "-m", "drumline.model.default_model", "--machine"]
    message, last = "", ""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            kind, _, rest = line.rstrip("\n").partition(" ")
            if kind == "@":
                fraction, _, last = rest.partition(" ")
                progress(last, float(fraction))
            elif kind == "!":
                message = rest
    if process.returncode != 0:
        raise ConfigError(message or f"preparing the default model ended with code {process.returncode} while {last}")
    return folder


# --- the hub ---------------------------------------------------------------------------------------------------------


def _snapshot(name: str, revision: str | None, *, weights: bool) -> Path:
    """Local snapshot of a hub model."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(f"{name} is no folder, and huggingface_hub is not installed: {error}") from error
    try:
        where: dict[str, Any] = {"revision": revision, "local_files_only": not _reachable(name, revision)}
        if weights:
            read_spec(Path(huggingface_hub.hf_hub_download(name, "config.json", **where)).parent)
        patterns = [*_TOKENIZER_FILES, *(_WEIGHT_FILES if weights else [])]
        folder = huggingface_hub.snapshot_download(name, allow_patterns=patterns, ignore_patterns=_IGNORED, **where)
    except ConfigError:
        raise
    except Exception as error:  # of httpx, of the hub's own: all mean that we do not have it
        raise ConfigError(f"cannot get {name} from the hub: {_reason(error)}") from error
    return Path(folder)


def _reachable(name: str, revision: str | None) -> bool:
    """The hub answers. Asked once: the retries of a download take half a minute to find out that it does not.

    Raises what the hub says about the model.
    """
    import huggingface_hub

    try:
        huggingface_hub.HfApi().model_info(name, revision=revision, timeout=CONNECT_S)
    except Exception as error:
        if not _no_network(error):
            raise
        return False
    return True


def _no_network(error: Any) -> bool:
    """The exception tells of a hub that did not answer. (What the hub answers are OSErrors too.)"""
    kind = type(error).__name__
    if getattr(error, "response", None) is not None:
        return False
    return isinstance(error, OSError) or any(word in kind for word in ("Connect", "Timeout", "Proxy", "Network"))


def _reason(error: Any) -> str:
    """One sentence about an exception of the hub's client."""
    kind = type(error).__name__
    known = {
        "RepositoryNotFoundError": "there is no such model, or it is private and HF_TOKEN does not open it",
        "GatedRepoError": "access must be granted on its page first; set HF_TOKEN to your token",
        "RevisionNotFoundError": "it has no such --revision",
        "EntryNotFoundError": "it has no config.json",
        "RemoteEntryNotFoundError": "it has no config.json",
        "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set and it was not fetched before",
        "HFValidationError": "that is neither a folder here nor a valid name",
    }
    if kind in known:
        return known[kind]
    if kind == "LocalEntryNotFoundError" or _no_network(error):
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            return known["OfflineModeIsEnabled"]
        return "there is no network, and it was not fetched before (name a local folder instead)"
    return f"{kind}: {error}"
