"""Every architecture, split in every way: logits of transformers, over chunked prefill and decoding with a paged cache.

Ranks of a TP group are threads here, so that all splits of all models take seconds. The road over real processes is in
test_worker_ranks.py and tests/matrix.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from drumline.errors import ConfigError
from drumline.model.attention import KVCache, make_batch
from drumline.model.forward import ModuleForward
from drumline.model.loader import load_model
from drumline.model.slices import slice_of
from drumline.model.spec import read_spec
from drumline.parallel.shards import Range
from tests.model.equality import TIE
from tests.model.tiny import FEATURES, SHAPES, edit_config, make_model, make_tiny, read_reference

Tiny = Callable[[str], tuple[Path, Any]]
CPU = torch.device("cpu")
BLOCK = 4


class ThreadGroup:
    """All-reduce between threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.boxes: list[Any] = [None] * size

    def member(self, rank: int) -> ThreadMember:
        return ThreadMember(self, rank)


class ThreadMember:
    """One thread's place in the group."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.group, self.rank_in_group, self.size = group, rank, group.size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.group.boxes[self.rank_in_group] = tensor.clone()
        self.group.barrier.wait()
        total = sum(self.group.boxes[1:], self.group.boxes[0].clone())
        self.group.barrier.wait()
        return tensor.copy_(total)

    def one_shot(self) -> None:
        """Threads have none."""


class Split:
    """A model on tp x len(stages) ranks, and their KV caches."""

    def __init__(
        self, folder: Path, tp: int, stages: Sequence[Range | None] = (None,), max_model_len: int = 256
    ) -> None:
        spec = read_spec(folder)
        group = ThreadGroup(tp)
        self.ranks: list[list[tuple[Any, KVCache]]] = []
        self.models: list[Any] = []
        for rank in range(tp):
            column = []
            for layers in stages:
                member = group.member(rank)
                model = load_model(
                    spec,
                    folder,
                    dtype=torch.float32,
                    device=CPU,
                    group=member,
                    layers=layers,
                    max_model_len=max_model_len,
                )
                self.models.append(model)
                cache = KVCache(
                    num_layers=slice_of(model).layers.size,
                    num_blocks=64,
                    num_kv_heads=spec.heads(tp)[rank].kv.size,
                    block_size=BLOCK,
                    head_dim=spec.head_dim,
                    dtype=torch.float32,
                    device=CPU,
                )
                column.append((ModuleForward(model), cache))
            self.ranks.append(column)
        self.tables = np.random.default_rng(0).permutation(64).astype(np.int32)[None]

    def logits(self, ids: torch.Tensor, chunks: Sequence[int]) -> torch.Tensor:
        """[T, vocabulary] for a prompt that comes in chunks."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return torch.cat(list(pool.map(lambda column: self._run(column, ids, chunks), self.ranks)), dim=1)

    @torch.inference_mode()
    def _run(self, column: list[tuple[Any, KVCache]], ids: torch.Tensor, chunks: Sequence[int]) -> torch.Tensor:
        pieces, done = [], 0
        for count in chunks:
            places = torch.arange(done, done + count)
            x = ids[places]
            for forward, cache in column:
                now = np.array([done], dtype=np.int32), np.array([count], dtype=np.int32)
                width = -(-(done + count) // BLOCK)
                x = forward(x, places, make_batch(cache, self.tables[:, :width], *now, CPU), torch.arange(count))
            pieces.append(x)
            done += count
        return torch.cat(pieces)


def check(model: Any, split: Split, length: int = 60) -> None:
    ids = torch.randint(3, model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(length))
    with torch.inference_mode():
        expected = model(input_ids=ids[None], use_cache=False).logits[0]
    got = split.logits(ids, [length - 19, 15, 1, 1, 2])
    assert got.shape == expected.shape
    worst = float((got - expected).abs().max() / expected.std())
    assert worst < TIE, worst


@pytest.mark.parametrize("tp", [1, 2, 3, 5])
def test_tensor_parallel(tiny: Tiny, shape: str, tp: int) -> None:
    folder, model = tiny(shape)
    check(model, Split(folder, tp))


@pytest.mark.parametrize("cuts", [(1, 2)])
def test_pipeline_stages(tiny: Tiny, shape: str, cuts: tuple[int, ...]) -> None:
    folder, model = tiny(shape)
    stages = [Range(start, stop) for start, stop in zip((0, *cuts), (*cuts, 3), strict=True)]
    check(model, Split(folder, 1, stages))


def test_both(tiny: Tiny, shape: str) -> None:
    folder, model = tiny(shape)
    check(model, Split(folder, 2, [Range(0, 1), Range(1, 3)]))


@pytest.mark.parametrize("head", ["another", "equal", "alone"])
def test_the_head_of_the_weights_goes_before_a_tie(tmp_path: Path, shape: str, head: str) -> None:
    """The configuration says that head and embedding are one; the weights have two, or the head's name alone."""
    make_tiny(tmp_path, shape, tie_word_embeddings=False)
    edit_config(tmp_path, tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    embedding = next(name for name in tensors if ".embed_" in name)
    own = next(name for name in tensors if name in ("lm_head.weight", "embed_out.weight"))
    if head != "another":
        tensors[own] = tensors[embedding].clone()
    if head == "alone":
        del tensors[embedding]
    save_file(tensors, file, metadata={"format": "pt"})
    reference = read_reference(tmp_path, shape)
    splits = ((1, (None,)), (1, (Range(0, 2), Range(2, 3))), (3, (None,)), (2, (Range(0, 1), Range(1, 3))))
    for tp, stages in splits if head == "another" else splits[:2]:
        split = Split(tmp_path, tp, stages)
        check(reference, split)
        for model in split.models if len(stages) == 1 else ():
            tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
            assert tied == (head != "another")


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_of_the_base_model_alone(tmp_path: Path, shape: str, tied: bool) -> None:
    """Its parameters lack the model's prefix; the head, if it is there, has its usual name."""
    make_tiny(tmp_path, shape, tie_word_embeddings=tied)
    whole = read_reference(tmp_path, shape)
    file, prefix = tmp_path / "model.safetensors", f"{whole.base_model_prefix}."
    save_file({name.removeprefix(prefix): tensor for name, tensor in load_file(file).items()}, file)
    check(whole, Split(tmp_path, 2, (Range(0, 1), Range(1, 3))))
    if tied:  # as save_pretrained of the base model writes it
        edit_config(tmp_path, architectures=[type(whole.base_model).__name__])
        check(whole, Split(tmp_path, 1, (None,)))


def test_a_window_of_nothing_is_none(tmp_path: Path) -> None:
    """As vLLM has it; transformers would mask everything."""
    make_tiny(tmp_path, "mistral", sliding_window=None)
    reference = transformers.MistralForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    edit_config(tmp_path, sliding_window=0)
    check(reference, Split(tmp_path, 2, (None,)))
    edit_config(tmp_path, sliding_window=-1)
    with pytest.raises(ConfigError, match=r"config\.json lacks or mistypes.*sliding_window: -1"):
        read_spec(tmp_path)


@pytest.mark.parametrize("tp", [1, 2])
def test_sequences_longer_than_the_first_training_take_the_long_frequencies(tmp_path: Path, tp: int) -> None:
    """transformers switches when a sequence gets longer than that; here the server's longest sequence decides."""
    model = make_tiny(tmp_path, "phi3-longrope", original_max_position_embeddings=32)
    check(model, Split(tmp_path, tp, max_model_len=64))
    with pytest.raises(AssertionError):
        check(model, Split(tmp_path, tp, max_model_len=32))
    check(model, Split(tmp_path, tp, max_model_len=32), length=32)


def test_the_models_features_change_their_answers() -> None:
    """Else the tests of equality would not notice that one is missing."""
    ids = torch.randint(3, 250, (1, 60), generator=torch.Generator().manual_seed(0))
    assert set(FEATURES) == set(SHAPES)
    for shape, features in FEATURES.items():
        with torch.inference_mode():
            plain = make_model(shape)(input_ids=ids, use_cache=False).logits
            for changes in features:
                changed = make_model(shape, **changes)(input_ids=ids, use_cache=False).logits
                assert float((changed - plain).std() / plain.std()) > 100 * TIE, (shape, changes)
