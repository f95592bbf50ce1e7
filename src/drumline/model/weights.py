"""Where parameters come from: safetensors files, of which only a rank's parts are read, or random numbers."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from drumline.errors import ConfigError, UnsupportedModelError
from drumline.model.expert_spec import name_of_today
from drumline.parallel.shards import Range

_FILE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

ALIASES = {"lm_head.weight": "embed_out.weight"}
"""Names of parameters in the transformers model, and what checkpoints may call them instead (GPT-NeoX)."""
_HEADS = {*ALIASES, *ALIASES.values()}


@dataclass(frozen=True)
class Part:
    """This rank's part of a tensor: ``ranges`` of dimension ``dim`` of the ``full`` shape, one after the other.

    There are several where projections are packed into one tensor (query, key and value; gate and up).
    """

    full: tuple[int, ...]
    dim: int
    ranges: tuple[Range, ...]
    stack: Range | None = None
    """What of dimension 0, if another one is ``dim`` (some experts of all); None: all of it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        shape = list(self.full)
        if self.stack is not None:
            shape[0] = self.stack.size
        shape[self.dim] = sum(range_.size for range_ in self.ranges)
        return tuple(shape)

    def indices(self) -> list[tuple[slice, ...]]:
        """Index of each range in the whole."""
        index = [slice(None) for _ in self.full]
        if self.stack is not None:
            index[0] = self.stack.as_slice()
        return [
            tuple(range_.as_slice() if dim == self.dim else every for dim, every in enumerate(index))
            for range_ in self.ranges
        ]


@dataclass(frozen=True)
class Piece:
    """What is read of one tensor of a checkpoint, and where it goes."""

    target: str
    """Name of a parameter or buffer of the model."""
    source: str
    """Name of the tensor."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    part: Part | None = None
    """None: all of it."""
    index: tuple[int | slice, ...] | None = None
    """Place in the parameter; None: it is the whole parameter."""
    arrange: Callable[[torch.Tensor], torch.Tensor] | None = None
    """What was read as the parameter has it; None: as it is."""


class WeightSource(Protocol):
    """Where parameters come from."""

    def check(self, names: list[str], folder: str) -> None:
        """Raise ConfigError if one of these parameters is missing."""

    def has(self, name: str) -> bool:
        """Whether there is a parameter of this name that may differ from what it is tied to."""

    def order(self, names: list[str]) -> Iterator[str]:
        """The names in the order in which reading is cheapest."""

    def read(self, name: str, shape: tuple[int, ...], part: Part | None) -> torch.Tensor:
        """This rank's part of a parameter on the CPU, in any float type; may be a view of a file."""


class SafetensorsWeights:
    """A checkpoint of one or more safetensors files."""

    def __init__(self, folder: Path, base: str = "") -> None:
        """``base``: what all parameters' names but the head's begin with (``model``, without the dot). A checkpoint of
        the base model alone leaves it out in all of them; transformers reads such ones too."""
        self._folder = folder
        self._files = _tensor_files(folder)
        bare = bool(base) and not any(name.startswith(f"{base}.") for name in self._files)
        self._stored = {
            known: name
            for name in self._files
            if (known := name_of_today(f"{base}.{name}" if bare and name not in _HEADS else name)) != name
        }
        self._stored |= {
            name: other for name, other in ALIASES.items() if name not in self._files and other in self._files
        }
        self._files |= {name: self._files[other] for name, other in self._stored.items()}
        self._open: tuple[str, Any] | None = None

    def check(self, names: list[str], folder: str) -> None:
        """Raise ConfigError if one of these parameters is missing."""
        if missing := [name for name in names if name not in self._files]:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ConfigError(
                f"the weights in {folder} lack {', '.join(missing[:3])}{more}: they do not fit config.json"
            )

    def has(self, name: str) -> bool:
        """A file has it."""
        return name in self._files

    def order(self, names: list[str]) -> Iterator[str]:
        """File by file."""
        return iter(sorted(names, key=lambda name: self._files[name]))

    def read(self, name: str, shape: tuple[int, ...], part: Part | None) -> torch.Tensor:
        """This rank's part; if it is one range, a view of the file, which lives as long as the view."""
        file = self._files[name]
        try:
            source = self._handle(file).get_slice(self._stored.get(name, name))
        except SafetensorError as error:
            raise ConfigError(f"{self._folder / file} lacks {name}, which its index names: {error}") from error
        if source.get_dtype() not in _FILE_DTYPES:
            raise UnsupportedModelError(f"weights of type {source.get_dtype()} ({name}) cannot be served yet")
        full = shape if part is None else part.full
        if tuple(source.get_shape()) != full:
            raise ConfigError(f"{name} is {source.get_shape()} in the weights, but {list(full)} by config.json")
        if part is None:
            whole: torch.Tensor = source[(slice(None),) * len(full)]
            return whole
        pieces = [source[index] for index in part.indices()]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, part.dim)

    def _handle(self, file: str) -> Any:
        """One file is open at a time."""
        if self._open is None or self._open[0] != file:
            self._open = (file, _open_file(self._folder / file))
        return self._open[1]


def _open_file(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error


def _tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name to file name."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if missing := sorted({file for file in weight_map.values() if not (folder / file).exists()}):
            raise ConfigError(f"{folder} lacks {', '.join(missing)}, which its index names: was it fetched completely?")
        return dict(weight_map)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no *.safetensors (other formats are not read; --load-format dummy needs none)")
    names: dict[str, str] = {}
    for file in files:
        with _open_file(folder / file) as handle:
            names |= dict.fromkeys(handle.keys(), file)
    return names


class DummyWeights:
    """Random weights of which a rank makes only its part.

    One table of normal numbers comes from the seed. A row (the last dimension) of a parameter is a window of it, at a
    place that follows from the parameter's name and the row's number: any part of any row costs just its own copy. Row
    numbers are multiplied by an odd number modulo the table's (power of two) size, so rows of one parameter never
    coincide.
    """

    SIZE = 1 << 22

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        table = torch.empty(self.SIZE).normal_(0.0, 0.02, generator=generator)
        self._table = torch.cat([table, table[: 1 << 18]])

    def check(self, names: list[str], folder: str) -> None:
        """Nothing is missing."""

    def has(self, name: str) -> bool:
        """All but the head: where the configuration ties it, it is the embedding."""
        return name != "lm_head.weight"

    def order(self, names: list[str]) -> Iterator[str]:
        """As they come."""
        return iter(names)

    def read(self, name: str, shape: tuple[int, ...], part: Part | None) -> torch.Tensor:
        """This rank's part; weights of norms are 1."""
        if len(shape) == 1 and name.endswith("norm.weight"):
            return torch.ones(shape)
        full = shape if part is None else part.full
        indices = [tuple(slice(None) for _ in full)] if part is None else part.indices()
        pieces = [self._piece(name, full, index) for index in indices]
        return pieces[0] if part is None or len(pieces) == 1 else torch.cat(pieces, part.dim)

    def _piece(self, name: str, full: tuple[int, ...], index: tuple[slice, ...]) -> torch.Tensor:
        rows = torch.arange(math.prod(full[:-1])).view(full[:-1])[index[:-1]]
        columns = range(full[-1])[index[-1]]
        place = zlib.crc32(name.encode())
        starts = (place + rows * (2 * (place >> 8) + 1)) % self.SIZE + columns.start
        return self._table.unfold(0, len(columns), 1)[starts]
