"""Loading: parts of tensors, sharded checkpoints, dummy weights, errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from drumline.errors import ConfigError
from drumline.model import loader, weights
from drumline.model.loader import load_model
from drumline.model.spec import read_spec
from drumline.model.weights import DummyWeights, Part
from drumline.parallel.shards import Range
from tests.model.tiny import make_tiny

Tiny = Callable[[str], tuple[Path, Any]]
CPU = torch.device("cpu")
MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


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


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, under the names that the model has for them."""
    tensors = load_file(folder / "model.safetensors")
    return fused({name.replace("embed_out.", "lm_head."): tensor for name, tensor in tensors.items()})


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the matrices of all experts of a layer in one tensor, as models have them."""
    plain, experts = {}, {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(.*)\.experts\.(\d+)\.(\w+)\.weight", name.replace(".block_sparse_moe.", ".mlp."))
        if found:
            experts[found[1], MIXTRAL.get(found[3], found[3]), int(found[2])] = tensor
        else:
            plain[name.replace(".block_sparse_moe.", ".mlp.")] = tensor
    for block in sorted({block for block, _, _ in experts}):
        count = len({expert for other, _, expert in experts if other == block})
        gate, up, down = (
            torch.stack([experts[block, leaf, expert] for expert in range(count)])
            for leaf in ("gate_proj", "up_proj", "down_proj")
        )
        plain[f"{block}.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        plain[f"{block}.experts.down_proj"] = down
    return {name: in_our_order(name, tensor, plain) for name, tensor in plain.items()}


def stored(model: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers that are in checkpoints; shared ones once."""
    names = model.state_dict()
    return {name: tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()] if name in names}


def in_our_order(name: str, tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Tensors of GPT-OSS's experts, which alone have biases, laid out as those of other models."""
    block, _, leaf = name.rpartition(".experts.")
    if f"{block}.experts.down_proj_bias" not in tensors or not block:
        return tensor
    if leaf in ("gate_up_proj", "down_proj"):
        tensor = tensor.transpose(1, 2)
    if leaf.startswith("gate_up_proj"):
        tensor = torch.cat([tensor[:, ::2], tensor[:, 1::2]], 1)
    return tensor


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_ranks_parts_make_up_the_checkpoint(tiny: Tiny, shape: str, size: int) -> None:
    folder, _ = tiny(shape)
    whole, spec = checkpoint(folder), read_spec(folder)
    ranks = [stored(load(folder, rank, size)) for rank in range(size)]
    assert set(ranks[0]) == set(whole)  # a tied head is listed once
    heads, dim = spec.heads(size), spec.head_dim
    owners = list(range(size))  # ranks that together have each KV head once
    if size > spec.num_kv_heads:
        owners = [[shard.kv.start for shard in heads].index(head) for head in range(spec.num_kv_heads)]
    for name, tensor in whole.items():
        mine = [rank[name] for rank in ranks if name in rank]
        leaf = name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]
        if all(part.shape == tensor.shape for part in mine):
            assert all(part.equal(tensor) for part in mine)
            continue
        if leaf == "qkv_proj":
            sizes = [[h.q.size * dim, h.kv.size * dim, h.kv.size * dim] for h in heads]
            split = [part.split(size) for part, size in zip(mine, sizes, strict=True)]
            query = torch.cat([q for q, _, _ in split])
            rest = [torch.cat([split[rank][i] for rank in owners]) for i in (1, 2)]
            assert torch.cat([query, *rest]).equal(tensor)
        elif leaf in ("gate_up_proj", "gate_up_proj_bias"):
            axis = 1 if ".experts." in name else 0
            halves = [torch.cat([part.chunk(2, axis)[i] for part in mine], axis) for i in (0, 1)]
            assert torch.cat(halves, axis).equal(tensor)
        else:
            if leaf in ("k_proj", "v_proj", "k_norm"):
                mine = [mine[rank] for rank in owners]
            axis = next(axis for axis in range(tensor.dim()) if mine[0].shape[axis] != tensor.shape[axis])
            assert torch.cat(mine, axis).equal(tensor), name


def test_stages_make_up_the_checkpoint(tiny: Tiny, shape: str) -> None:
    folder, _ = tiny(shape)
    whole, spec = checkpoint(folder), read_spec(folder)
    embedding = next(name for name in whole if ".embed_" in name)
    seen = []
    for layers in (Range(0, 1), Range(1, 2), Range(2, 3)):
        for name, parameter in stored(load(folder, layers=layers)).items():
            source = re.sub(r"layers\.0\.", f"layers.{layers.start}.", name)
            if spec.tied and name == "lm_head.weight":
                source = embedding
            assert parameter.equal(whole[source]), source
            seen.append(source)
    assert sorted(seen) == sorted([*whole, embedding] if spec.tied else whole)


def test_tied_weights_are_one_tensor(tiny: Tiny) -> None:
    for rank in range(2):
        model = load(tiny("llama-tied")[0], rank, 2)
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_tensor_that_is_split_is_never_read_whole(tiny: Tiny, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = tiny(shape)
    read: dict[str, int] = {}

    class Spy:
        """Counts the elements that are read from a file."""

        def __init__(self, path: Path) -> None:
            self.file = safe_open(str(path), framework="pt")

        def get_slice(self, name: str) -> Any:
            source = self.file.get_slice(name)

            class Piece:
                get_dtype, get_shape = source.get_dtype, source.get_shape

                def __getitem__(self, index: Any) -> torch.Tensor:
                    tensor: torch.Tensor = source[index]
                    read[name] = read.get(name, 0) + tensor.numel()
                    return tensor

            return Piece()

    monkeypatch.setattr(weights, "_open_file", Spy)
    monkeypatch.setattr(weights, "_tensor_files", lambda folder: dict.fromkeys(names, "model.safetensors"))
    names = {name: tensor.numel() for name, tensor in load_file(folder / "model.safetensors").items()}
    load(folder, 1, 2)
    assert set(read) == {name for name in names if not name.endswith("experts.down_proj_bias")}  # rank 0 has it
    split = r"((?<!q_a)_proj|dense\w*|query_key_value|embed_\w+|lm_head|\.w[123])\.weight|experts\.\w+_proj$"
    matrices = [name for name in read if re.search(split, name)]
    spec = read_spec(folder)
    linears = {"phi3": 4, "gpt_neox": 4, "gpt_oss": 6, "deepseek_v3": 6}.get(spec.model_type, 7)
    experts = 0 if spec.experts is None else len(spec.experts.layers)
    more = 0
    if spec.experts is not None and not spec.experts.interleaved:
        more = experts * 3 * (spec.experts.num_experts - 1 + (spec.experts.shared_width > 0))
    assert len(matrices) == 3 * linears + more + (1 if spec.tied else 2)
    shared = () if spec.num_kv_heads > 1 else ("k_proj", "v_proj")  # a KV head that both ranks need
    for name in matrices:
        assert read[name] <= 0.51 * names[name] or name.split(".")[-2] in shared, name


def test_sharded_checkpoint_in_bfloat16(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama", torch.bfloat16, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    done: list[float] = []
    model = load(tmp_path, 1, 2, progress=done.append)
    assert all(parameter.dtype == torch.float32 and parameter.is_contiguous() for parameter in model.parameters())
    assert done == sorted(done)
    assert done[-1] == 1.0
    second = next(iter(tmp_path.glob("*-00002-*.safetensors")))
    tensors = load_file(second)
    save_file(dict(list(tensors.items())[1:]), second)
    with pytest.raises(ConfigError, match=f"{second.name} lacks {next(iter(tensors))}, which its index names"):
        load(tmp_path)
    second.unlink()
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
