"""Loading: parts of tensors, sharded checkpoints, dummy weights, errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drumline.errors import ConfigError
from drumline.model import loader
from drumline.model.loader import load_model
from drumline.model.spec import read_spec
from drumline.model.weights import DummyWeights, Part, SafetensorsWeights
from drumline.parallel.shards import Range
from tests.model.tiny import make_tiny

Tiny = Callable[[str], tuple[Path, Any]]
CPU = torch.device("cpu")


@dataclass
class Place:
    """A place in a group; loading needs no communication."""

    rank_in_group: int = 0
    size: int = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("loading is no collective")


def load(folder: Path, rank: int = 0, size: int = 1, **options: Any) -> Any:
    return load_model(
        read_spec(folder),
        folder,
        dtype=options.pop("dtype", torch.float32),
        device=CPU,
        group=Place(rank, size),
        **options,
    )


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_ranks_parts_make_up_the_checkpoint(tiny: Tiny, shape: str, size: int) -> None:
    folder, _ = tiny(shape)
    whole = load_file(folder / "model.safetensors")
    parts = [dict(load(folder, rank, size).named_parameters()) for rank in range(size)]
    spec = read_spec(folder)
    for name, tensor in whole.items():
        mine = [part[name] for part in parts]
        if all(part.shape == tensor.shape for part in mine):
            assert all(part.equal(tensor) for part in mine)
            continue
        dim = next(dim for dim in range(tensor.dim()) if mine[0].shape[dim] != tensor.shape[dim])
        if size > spec.num_kv_heads and ("k_proj" in name or "v_proj" in name):
            mine = [mine[index] for index in _first_of_each_head(spec, size)]
        assert torch.cat(mine, dim).equal(tensor), name
    assert set(parts[0]) == set(whole)  # a tied head is listed once


def _first_of_each_head(spec: Any, size: int) -> list[int]:
    heads = [shard.kv.start for shard in spec.heads(size)]
    return [heads.index(head) for head in range(spec.num_kv_heads)]


def test_tied_weights_are_one_tensor(tiny: Tiny) -> None:
    for rank in range(2):
        model = load(tiny("llama-tied")[0], rank, 2)
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_tensor_that_is_split_is_never_read_whole(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = tiny("llama")
    read: dict[str, int] = {}
    original = SafetensorsWeights.read

    def spy(self: SafetensorsWeights, name: str, shape: tuple[int, ...], part: Part | None) -> torch.Tensor:
        tensor = original(self, name, shape, part)
        read[name] = tensor.numel()
        return tensor

    monkeypatch.setattr(SafetensorsWeights, "read", spy)
    load(folder, 1, 2)
    whole = {name: tensor.numel() for name, tensor in load_file(folder / "model.safetensors").items()}
    large = [name for name in read if "_proj.weight" in name or "embed" in name or "lm_head" in name]
    assert len(large) == 3 * 7 + 2
    assert all(read[name] <= 0.51 * whole[name] for name in large)


def test_sharded_checkpoint_in_bfloat16(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama", torch.bfloat16, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    done: list[float] = []
    model = load(tmp_path, 1, 2, progress=done.append)
    assert all(parameter.dtype == torch.float32 and parameter.is_contiguous() for parameter in model.parameters())
    assert done == sorted(done)
    assert done[-1] == 1.0
    next(iter(tmp_path.glob("*-00002-*.safetensors"))).unlink()
    with pytest.raises(ConfigError, match=r"00002.*which its index names"):
        load(tmp_path)


def test_weights_stay_when_the_file_is_overwritten(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen2")
    model = load(tmp_path)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write(b"\xff" * file.stat().st_size)
    assert all(parameter.equal(before[name]) for name, parameter in model.named_parameters())


def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors.pop("lm_head.weight")
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"lack lm_head\.weight"):
        load(tmp_path)
    save_file(tensors | {"lm_head.weight": head[:-1].contiguous()}, file)
    with pytest.raises(ConfigError, match=r"lm_head\.weight is \[306, 72\] in the weights, but \[307, 72\]"):
        load(tmp_path)
    save_file(tensors | {"lm_head.weight": head.to(torch.int8)}, file)
    with pytest.raises(ConfigError, match="type I8"):
        load(tmp_path)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        load(tmp_path)
    file.unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        load(tmp_path)


def test_dummy_parts_are_parts_of_one_tensor() -> None:
    source = DummyWeights(3)
    whole = source.read("a.weight", (40, 30), None)
    rows = source.read("a.weight", (9, 30), Part((40, 30), 0, (Range(11, 20),)))
    columns = source.read("a.weight", (40, 7), Part((40, 30), 1, (Range(5, 12),)))
    assert rows.equal(whole[11:20])
    assert columns.equal(whole[:, 5:12])
    assert source.read("a.bias", (4,), Part((40,), 0, (Range(6, 10),))).equal(source.read("a.bias", (40,), None)[6:10])
    assert not whole.equal(source.read("b.weight", (40, 30), None))
    assert not whole.equal(DummyWeights(4).read("a.weight", (40, 30), None))
    assert len(torch.unique(source.read("embed", (150_000, 2), None), dim=0)) == 150_000
    assert float(source.read("w", (500, 500), None).std()) == pytest.approx(0.02, rel=0.02)


def test_dummy_needs_only_the_config(tmp_path: Path, tiny: Tiny) -> None:
    folder, _ = tiny("llama")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    model = load(tmp_path, load_format="dummy")
    ids = torch.tensor([[1, 2, 3]])
    batch = loader.attention.dummy_batch(3)
    logits = model(input_ids=ids, position_ids=torch.arange(3)[None], use_cache=False, ctx=batch).logits
    assert logits.isfinite().all()
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == logits.shape[-1]
