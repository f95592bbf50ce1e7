"""Build a transformers model that holds only this rank's share, and fill it from safetensors.

1. The model class is built on the meta device (shapes, no memory).
2. The model's own tensor-parallel plan (``base_model_tp_plan`` of its configuration, ``_tp_plan`` of its class) says
   which linears are split by rows or columns; ``parallel.shards`` says where. Column-parallel linears just become
   smaller. Row-parallel ones become :class:`RowParallelLinear` (all-reduce, then bias). Embedding and head are split by
   vocabulary, whatever the plan says, so that no rank holds a whole one; the head's logits stay split (``sampling``).
3. Each parameter is read by ``safe_open(...).get_slice(name)[range]``: a tensor that is to be split is not read whole.
4. Buffers that are not in checkpoints (rotary frequencies) are made by building their module anew.

Rejected: transformers' own tensor parallelism (cannot split heads unevenly, DTensors swapped in each call), forward
hooks (a hook cannot add the bias after the sum).
"""

from __future__ import annotations

import importlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn import functional

from drumline.errors import ConfigError, UnsupportedModelError
from drumline.model import attention
from drumline.model.spec import ModelSpec
from drumline.parallel.shards import Range, vocab_shards, width_shards

Progress = Callable[[float], None]
"""Gets the part that is done, 0 .. 1."""

_COLUMN_STYLES = frozenset({"colwise", "colwise_rep", "colwise_gather_output"})
_ROW_STYLES = frozenset({"rowwise", "rowwise_rep"})
_WIDTH_MULTIPLE = 16
"""MLP ranges begin at whole cache lines of float32."""

_FILE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class TPGroup(Protocol):
    """What parallel layers need of the tensor-parallel group (``parallel.groups.GroupCoordinator``)."""

    @property
    def size(self) -> int:
        """Number of members."""

    @property
    def rank_in_group(self) -> int:
        """Place of this rank."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all members, in place."""


@dataclass(frozen=True)
class Part:
    """This rank's part of a tensor: ``range`` of dimension ``dim`` of the ``full`` shape."""

    full: tuple[int, ...]
    dim: int
    range: Range

    def index(self) -> tuple[slice, ...]:
        """Index of the part in the whole."""
        return tuple(self.range.as_slice() if dim == self.dim else slice(None) for dim in range(len(self.full)))


class RowParallelLinear(nn.Module):
    """A linear whose input features are split over the group; the sum and the whole bias are on every rank."""

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, group: TPGroup) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device="meta"))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device="meta")) if bias else None
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., this rank's features] to [..., out_features]."""
        out = self._group.all_reduce(functional.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


class VocabParallelEmbedding(nn.Module):
    """An embedding of which each rank holds the rows of its vocabulary range."""

    def __init__(self, ids: Range, dim: int, dtype: torch.dtype, group: TPGroup) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(ids.size, dim, dtype=dtype, device="meta"))
        self._ids = ids
        self._group = group

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[...] ids to [..., dim]."""
        local = input_ids - self._ids.start
        outside = (local < 0) | (local >= self._ids.size)
        rows = functional.embedding(local.masked_fill(outside, 0), self.weight)
        return self._group.all_reduce(rows.masked_fill(outside.unsqueeze(-1), 0))


def load_model(
    spec: ModelSpec,
    folder: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: TPGroup,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress = lambda done: None,
) -> nn.Module:
    """The model of ``folder`` with this rank's share of the weights, in eval mode, on ``device``.

    ``load_format`` ``dummy`` makes weights that are a pure function of (seed, parameter name, full shape), so every
    TP size has the same model. Raises ConfigError if the checkpoint does not fit the configuration.
    """
    attention.register()
    model = _build(spec, folder, dtype)
    parts = _split(model, spec, dtype, group)
    if spec.tied:
        _tie(model)
    wanted = {name: parts.get(name) for name, _ in model.named_parameters()}
    if load_format == "dummy":
        source: WeightSource = DummyWeights(seed)
    else:
        source = SafetensorsWeights(Path(folder))
    source.check(list(wanted), f"{folder}")
    _fill(model, wanted, source, dtype, device, progress)
    if spec.tied:
        _tie(model)
    _rebuild_buffers(model, device)
    loaded: nn.Module = model.eval().requires_grad_(False)
    return loaded


def vocab_range(spec: ModelSpec, group: TPGroup) -> Range:
    """Vocabulary ids whose embedding rows and logits this rank has."""
    return vocab_shards(spec.vocab_size, group.size)[group.rank_in_group]


def _build(spec: ModelSpec, folder: str | Path, dtype: torch.dtype) -> Any:
    modeling = importlib.import_module(f"transformers.models.{spec.model_type}.modeling_{spec.model_type}")
    model_class = getattr(modeling, spec.architecture)
    config = model_class.config_class.from_pretrained(str(folder), local_files_only=True)
    with torch.device("meta"):
        return model_class._from_config(config, attn_implementation=attention.NAME, dtype=dtype)


# --- parallel layers -------------------------------------------------------------------------------------------------


def tp_plan(model: Any) -> dict[str, str]:
    """Module name pattern (``*`` stands for a layer number) to style, from the model's configuration and class."""
    prefix = model.base_model_prefix
    base: Mapping[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    own: Mapping[str, str] = getattr(type(model), "_tp_plan", None) or {}
    return {f"{prefix}.{name}": style for name, style in base.items()} | dict(own)


def _split(model: Any, spec: ModelSpec, dtype: torch.dtype, group: TPGroup) -> dict[str, Part]:
    """Put parallel layers in; what part of which parameter this rank has. Parameters that are not split are absent."""
    if group.size == 1:
        return {}
    parts: dict[str, Part] = {}
    plan = {re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in tp_plan(model).items()}
    if not plan:
        raise UnsupportedModelError(f"{spec.architecture} has no tensor-parallel plan: use --tensor-parallel-size 1")
    for name, module in list(model.named_modules()):
        style = next((style for pattern, style in plan.items() if pattern.fullmatch(name)), None)
        if style is None or module is model.get_input_embeddings():
            continue  # the embedding is split by vocabulary below; 5.17 names it in the plan of tied models, 5.24 not
        if not isinstance(module, nn.Linear) or style not in _COLUMN_STYLES | _ROW_STYLES:
            raise UnsupportedModelError(f"{spec.architecture}: cannot split {name} as the model's plan says ({style})")
        if style in _COLUMN_STYLES:
            parts |= _split_columns(model, name, module, spec, dtype, group)
        else:
            parts |= _split_rows(model, name, module, spec, dtype, group)
    return parts | _split_embedding(model, spec, dtype, group)


def _range_of(name: str, width: int, spec: ModelSpec, group: TPGroup) -> Range:
    """This rank's range of the split dimension of a linear: by heads in attention, by vocabulary in the head."""
    leaf = name.rpartition(".")[2]
    rank, size = group.rank_in_group, group.size
    if leaf in ("q_proj", "o_proj"):
        return spec.heads(size)[rank].q.scaled(spec.head_dim)
    if leaf in ("k_proj", "v_proj"):
        return spec.heads(size)[rank].kv.scaled(spec.head_dim)
    if leaf == "lm_head":
        return vocab_shards(spec.vocab_size, size)[rank]
    return width_shards(width, size, _WIDTH_MULTIPLE)[rank]


def _split_columns(
    model: Any, name: str, module: nn.Linear, spec: ModelSpec, dtype: torch.dtype, group: TPGroup
) -> dict[str, Part]:
    part = _range_of(name, module.out_features, spec, group)
    bias = module.bias is not None
    small = nn.Linear(module.in_features, part.size, bias=bias, device="meta", dtype=dtype)
    model.set_submodule(name, small)
    parts = {f"{name}.weight": Part((module.out_features, module.in_features), 0, part)}
    if bias:
        parts[f"{name}.bias"] = Part((module.out_features,), 0, part)
    return parts


def _split_rows(
    model: Any, name: str, module: nn.Linear, spec: ModelSpec, dtype: torch.dtype, group: TPGroup
) -> dict[str, Part]:
    part = _range_of(name, module.in_features, spec, group)
    small = RowParallelLinear(part.size, module.out_features, module.bias is not None, dtype, group)
    model.set_submodule(name, small)
    return {f"{name}.weight": Part((module.out_features, module.in_features), 1, part)}


def _split_embedding(model: Any, spec: ModelSpec, dtype: torch.dtype, group: TPGroup) -> dict[str, Part]:
    embedding = model.get_input_embeddings()
    ids = vocab_range(spec, group)
    model.set_input_embeddings(VocabParallelEmbedding(ids, embedding.embedding_dim, dtype, group))
    name = next(name for name, module in model.named_modules() if isinstance(module, VocabParallelEmbedding))
    return {f"{name}.weight": Part((spec.vocab_size, embedding.embedding_dim), 0, ids)}


def _tie(model: Any) -> None:
    """Head and embedding are one tensor (both split by the same vocabulary ranges)."""
    model.get_output_embeddings().weight = model.get_input_embeddings().weight


# --- weights ---------------------------------------------------------------------------------------------------------


class WeightSource(Protocol):
    """Where parameters come from."""

    def check(self, names: list[str], folder: str) -> None:
        """Raise ConfigError if one of these parameters is missing."""

    def order(self, names: list[str]) -> Iterator[str]:
        """The names in the order in which reading is cheapest."""

    def read(self, name: str, shape: tuple[int, ...], part: Part | None) -> torch.Tensor:
        """This rank's part of a parameter on the CPU, in any float type; may be a view of a file."""


class SafetensorsWeights:
    """A checkpoint of one or more safetensors files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = _tensor_files(folder)
        self._open: tuple[str, Any] | None = None

    def check(self, names: list[str], folder: str) -> None:
        """Raise ConfigError if one of these parameters is missing."""
        if missing := [name for name in names if name not in self._files]:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ConfigError(
                f"the weights in {folder} lack {', '.join(missing[:3])}{more}: they do not fit config.json"
            )

    def order(self, names: list[str]) -> Iterator[str]:
        """File by file."""
        return iter(sorted(names, key=lambda name: self._files[name]))

    def read(self, name: str, shape: tuple[int, ...], part: Part | None) -> torch.Tensor:
        """This rank's part; a view of the file, which lives as long as the view."""
        handle = self._handle(self._files[name])
        source = handle.get_slice(name)
        if source.get_dtype() not in _FILE_DTYPES:
            raise UnsupportedModelError(f"weights of type {source.get_dtype()} ({name}) cannot be served yet")
        full = shape if part is None else part.full
        if tuple(source.get_shape()) != full:
            raise ConfigError(f"{name} is {source.get_shape()} in the weights, but {list(full)} by config.json")
        tensor: torch.Tensor = source[(slice(None),) * len(full)] if part is None else source[part.index()]
        return tensor

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

    One table of normal numbers comes from the seed. A row of a parameter is a window of it, at a place that follows
    from the parameter's name and the row's number: any part of any row costs just its own copy. Row numbers are
    multiplied by an odd number modulo the table's (power of two) size, so rows of one parameter never coincide.
    """

    SIZE = 1 << 22

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        table = torch.empty(self.SIZE).normal_(0.0, 0.02, generator=generator)
        self._table = torch.cat([table, table[: 1 << 18]])

    def check(self, names: list[str], folder: str) -> None:
        """Nothing is missing."""

    def order(self, names: list[str]) -> Iterator[str]:
        """As they come."""
        return iter(names)

    def read(self, name: str, shape: tuple[int, ...], part: Part | None) -> torch.Tensor:
        """This rank's part; weights of norms are 1."""
        if len(shape) == 1 and name.endswith("norm.weight"):
            return torch.ones(shape)
        full = shape if part is None else part.full
        index = tuple(slice(None) for _ in full) if part is None else part.index()
        rows = torch.arange(full[0] if len(full) == 2 else 1)[index[0] if len(full) == 2 else slice(None)]
        columns = range(full[-1])[index[-1]]
        place = zlib.crc32(name.encode())
        starts = (place + rows * (2 * (place >> 8) + 1)) % self.SIZE + columns.start
        windows = self._table.unfold(0, len(columns), 1)
        return windows[starts].view([len(range(size)[one]) for size, one in zip(full, index, strict=True)])


def _fill(
    model: Any,
    wanted: Mapping[str, Part | None],
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> None:
    """Give every parameter memory and content."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    done, reported = 0, 0.0
    for name in source.order(list(wanted)):
        tensor = source.read(name, shapes[name], wanted[name])
        if tuple(tensor.shape) != shapes[name]:
            raise ConfigError(f"{name}: got {list(tensor.shape)} where {list(shapes[name])} is needed")
        # A copy in any case: a view would keep the file mapped, and break if somebody rewrites it.
        own = tensor.to(device=device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)
        module_name, _, leaf = name.rpartition(".")
        model.get_submodule(module_name).register_parameter(leaf, nn.Parameter(own, requires_grad=False))
        done += own.numel()
        if done / total >= reported + 0.05 or done == total:
            reported = done / total
            progress(reported)


def _rebuild_buffers(model: Any, device: torch.device) -> None:
    """Modules with buffers that no checkpoint has (rotary embeddings) are built anew off the meta device."""
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            model.set_submodule(name, type(module)(config=model.config).to(device))
    left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if left:
        raise UnsupportedModelError(f"{type(model).__name__}: nothing says how to fill {', '.join(left[:5])}")
