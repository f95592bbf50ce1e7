"""The forward on CPUs with one thread: flat layers (``model.flat``) as a program (``kernels.step``) of kernels.

Building it lays the weights out for the kernels, one matrix after the other, each freed as it is done; a checkpoint of
16-bit numbers stays in 16 bits (``kernels.products.Panels``). A step fills registers with the addresses of its rows and
runs the program. It comes back for what is not compiled: norms over more heads than this rank has, activations that no
kernel has, sums over ranks that are late or through anything but shared memory.

The last layer goes on with those rows only whose logits are wanted, once it has written its keys and values: a quarter
of a prompt's arithmetic in a model of four layers.

Memory beside weights: buffers for the rows of the largest step so far. All of them stay, since a new one each step
would be touched for the first time each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from drumline.model import flat
from drumline.model.attention import AttentionBatch, KVCache
from drumline.model.kernels import attention, products
from drumline.model.kernels.products import Panels
from drumline.model.kernels.step import WIDTH, Op, Reg, Rows, Stop, Sum, run
from drumline.model.layers import TPGroup
from drumline.model.linears import narrow_storage
from drumline.parallel.shm import OneShot

LEAST_ROWS = 64
"""Rows that buffers have at least."""

DUMMY_BLOCK = 16
"""Tokens of a block in a dummy step."""

_ACTIVATIONS = {
    "SiLU": Op.SILU,
    "SiLUActivation": Op.SILU,
    "GELUTanh": Op.GELU_TANH,
    "PytorchGELUTanh": Op.GELU_TANH,
    "NewGELUActivation": Op.GELU_TANH,
    "GELU": Op.GELU,
    "GELUActivation": Op.GELU,
}


class _Buffers:
    """Float32 buffers [rows, width] in registers."""

    def __init__(self, widths: dict[Reg, int]) -> None:
        self._widths = widths
        self.rows = 0
        self._data: dict[Reg, torch.Tensor] = {}
        self._views: dict[tuple[Reg, int], torch.Tensor] = {}

    def grow(self, rows: int, registers: npt.NDArray[np.int64]) -> None:
        """Have room for so many rows."""
        self.rows = max(rows, LEAST_ROWS, min(2 * self.rows, rows + 256))
        self._views.clear()
        for reg, width in self._widths.items():
            self._data[reg] = torch.zeros(self.rows * width)
            registers[reg] = self._data[reg].data_ptr()

    def view(self, reg: Reg, rows: int) -> torch.Tensor:
        """The first rows of a buffer."""
        found = self._views.get((reg, rows))
        if found is None:
            width = self._widths[reg]
            found = self._views[reg, rows] = self._data[reg][: rows * width].view(rows, width)
        return found


class _Sum:
    """A group that the program sums over, as the program sees it."""

    def __init__(self, one_shot: OneShot) -> None:
        self._one_shot = one_shot
        slots = [address for turn in one_shot.slots for address in turn]
        head = [len(one_shot.others) + 1, one_shot.place, 0, 0, 0, 0, one_shot.own]
        self._numbers = np.array([*head, *one_shot.others, *slots], dtype=np.int64)
        self.address = self._numbers.ctypes.data

    def take_state(self) -> None:
        """Before the program runs."""
        self._numbers[Sum.TURN], self._numbers[Sum.NUMBER] = self._one_shot.state
        self._numbers[Sum.MOST_BYTES], self._numbers[Sum.LOOKS] = self._one_shot.most_bytes, self._one_shot.looks

    def give_state(self) -> None:
        """Before anybody else uses the group."""
        self._one_shot.state = int(self._numbers[Sum.TURN]), int(self._numbers[Sum.NUMBER])

    def stopped(self, registers: npt.NDArray[np.int64], otherwise: Callable[[], None]) -> None:
        """Do what the program came back for; ``otherwise`` sums what is too large for one shot."""
        number = int(self._numbers[Sum.NUMBER])
        why = registers[Reg.PHASE]
        if why == Stop.LARGE:
            otherwise()
            return
        registers[Reg.PHASE] = Stop.READ
        if why == Stop.WAKE:
            self._one_shot.wake(number)
        else:
            self._one_shot.wait(number)


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]  # array.ctypes is a layer more
    return address


def _late_requests(
    places: npt.NDArray[np.int64],
    first: npt.NDArray[np.int64],
    count: npt.NDArray[np.int64],
    computed: npt.NDArray[np.int64],
    tables: npt.NDArray[np.int32],
) -> tuple[npt.NDArray[Any], ...]:
    """Requests' rows (as the arguments are) of the tokens at ascending ``places``, neighbours of a request together."""
    if len(places) == len(count) and bool((places == first + count - 1).all()):  # the last token of each
        return places, np.ones(len(places), dtype=np.int64), computed + count - 1, tables
    request = np.searchsorted(first, places, side="right") - 1
    begins = np.flatnonzero(np.r_[True, (np.diff(places) > 1) | (np.diff(request) > 0)][: len(places)])
    request = request[begins]
    return (
        places[begins],
        np.diff(np.r_[begins, len(places)]),
        computed[request] + places[begins] - first[request],
        tables[request],
    )


class CompiledForward:
    """Runs a loaded model (``loader.load_model``) in float32 on the CPU. Takes its parameters over."""

    gathers = False

    def __init__(self, model: Any, max_model_len: int) -> None:
        read = flat.read_model(model, max_model_len, torch.float32)
        self._hidden, self._head_dim = read.hidden, read.head_dim
        self._q_heads, self._kv_heads = read.q_heads, read.kv_heads
        self._first, self._last = read.embedding is not None, read.head is not None
        self._code: list[list[int]] = []
        self._numbers: list[list[float]] = []
        self._calls: list[Callable[[], None]] = []
        self._kept: list[Any] = []
        """What instructions have addresses of."""
        self._panels: list[Panels] = []
        self._tables: list[torch.Tensor] = []
        self._sums: list[_Sum] = []
        self._vocab = 0 if read.head is None else read.head.weight.shape[0]
        self._rope = {name: self._keep(table.float().contiguous()) for name, table in read.rope.items()}
        qkv_width = (read.q_heads + 2 * read.kv_heads) * read.head_dim
        up_width = max((layer.gate_up.weight.shape[0] for layer in read.layers), default=1)
        inputs = max((layer.down.weight.shape[1] for layer in read.layers), default=1)
        self._inputs = max(inputs, read.hidden, read.q_heads * read.head_dim)
        self._buffers = _Buffers(
            {
                Reg.X: read.hidden,
                Reg.H: read.hidden,
                Reg.QKV: qkv_width,
                Reg.ATTENDED: read.q_heads * read.head_dim,
                Reg.UP: up_width,
                Reg.DELTA: read.hidden,
                Reg.PICKED: read.hidden,
            }
        )
        self._scratch = torch.empty(0)
        self._registers = np.zeros(Reg.CACHE + 2 * len(read.layers), dtype=np.int64)
        self._cache: KVCache | None = None
        self._rows: tuple[torch.Tensor, ...] = ()
        self._held: tuple[npt.NDArray[Any], ...] = ()
        self._inputs_before: tuple[Any, ...] | None = None
        """Of the last step, if it may come again with the same tensors and arrays, counted up in place."""
        self._build(read)
        self._program = np.array(self._code, dtype=np.int64), np.array(self._numbers, dtype=np.float64)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices."""
        return sum(panels.nbytes for panels in self._panels) + sum(table.nbytes for table in self._tables)

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, keep: torch.Tensor
    ) -> torch.Tensor:
        """See :class:`drumline.model.forward.Forward`."""
        inputs, self._inputs_before = self._inputs_before, None
        if inputs is None or any(a is not b for a, b in zip(inputs, (ids, positions, batch, keep), strict=True)):
            self._set_rows(ids, positions, batch, keep)
            # Then all addresses are those of what the caller has, and only the numbers there may change.
            lasts = batch.num_computed.dtype == batch.num_tokens.dtype == np.int64 and self._first
            inputs = (ids, positions, batch, keep) if lasts else None
        x, logits = self._rows
        code, numbers = self._program
        reg = self._registers
        reg[Reg.PHASE] = Stop.START
        self._take_states()
        pc = run(code, numbers, reg, 0)
        while pc < len(code) - 1:
            self._give_states()
            self._calls[code[pc, -1]]()
            self._take_states()
            pc = run(code, numbers, reg, pc + (code[pc, 0] == Op.CALL))
        self._give_states()
        self._inputs_before = inputs
        return logits if self._last else x

    def _take_states(self) -> None:
        for summing in self._sums:
            summing.take_state()

    def _give_states(self) -> None:
        for summing in self._sums:
            summing.give_state()

    def _set_rows(self, ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, keep: torch.Tensor) -> None:
        """Addresses of a step's rows, and memory for what it computes."""
        tokens, kept = ids.shape[0], keep.shape[0]
        ends: npt.NDArray[np.int64] = batch.num_tokens.cumsum(dtype=np.int64)
        first: npt.NDArray[np.int64] = ends - batch.num_tokens
        count, computed = np.asarray(batch.num_tokens, np.int64), np.asarray(batch.num_computed, np.int64)
        tables = np.ascontiguousarray(batch.tables, dtype=np.int32)
        reg = self._registers
        if max(tokens, kept) > self._buffers.rows:
            self._grow(max(tokens, kept))
        if self._last:  # new memory each time would be touched for the first time each time
            x = self._buffers.view(Reg.X, tokens)
            if not self._first:
                x.copy_(ids)
        else:  # the caller gets it
            x = torch.empty(tokens, self._hidden) if self._first else ids.clone()
        logits = torch.empty(kept, self._vocab)
        if batch.cache is None:
            tables = self._take_none(tokens)
        elif batch.cache is not self._cache:
            self._take_cache(batch.cache, batch.cache.keys, batch.cache.values)
        self._rows = x, logits
        rows = first, count, computed, tables
        reg[Reg.TOKENS], reg[Reg.KEPT] = tokens, kept
        self._set_requests(Reg.BATCH, *rows)
        reg[Reg.TABLE_STRIDE] = tables.shape[1]
        reg[Reg.IDS], reg[Reg.POSITIONS] = ids.data_ptr(), positions.data_ptr()
        places = keep.numpy()
        if kept < tokens and bool((places[1:] > places[:-1]).all()):
            late = _late_requests(places, *rows)
            reg[Reg.LATE], reg[Reg.EARLY], reg[Reg.KEEP] = kept, keep.data_ptr(), 0
        else:
            late = rows
            reg[Reg.LATE], reg[Reg.EARLY], reg[Reg.KEEP] = tokens, 0, keep.data_ptr()
        self._set_requests(Reg.LATE_BATCH, *late)
        self._held = *rows, *late
        reg[Reg.X] = x.data_ptr()
        reg[Reg.LOGITS] = logits.data_ptr()

    def _set_requests(self, reg: Reg, *rows: npt.NDArray[Any]) -> None:
        """Number and addresses of requests' first rows, counts, computed tokens and block tables."""
        self._registers[reg : reg + 5] = (len(rows[0]), *map(_address, rows))

    def _grow(self, rows: int) -> None:
        self._buffers.grow(rows, self._registers)
        floats = max(
            products.scratch_floats(self._buffers.rows, self._inputs),
            attention.scratch_floats(self._kv_heads, self._q_heads // self._kv_heads, self._head_dim),
        )
        self._scratch = torch.empty(floats + 16)
        self._registers[Reg.SCRATCH] = (self._scratch.data_ptr() + 63) // 64 * 64

    def _take_cache(self, cache: KVCache, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        self._cache = cache
        registers = self._registers
        registers[Reg.BLOCK] = cache.block_size
        registers[Reg.CACHE :: 2] = [layer.data_ptr() for layer in keys]
        registers[Reg.CACHE + 1 :: 2] = [layer.data_ptr() for layer in values]

    def _take_none(self, tokens: int) -> npt.NDArray[np.int32]:
        """For a dummy step: all layers share a cache of one row. Its table."""
        cache = KVCache(
            num_layers=1,
            num_blocks=-(-tokens // DUMMY_BLOCK),
            num_kv_heads=self._kv_heads,
            block_size=DUMMY_BLOCK,
            head_dim=self._head_dim,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        layers = (len(self._registers) - Reg.CACHE) // 2
        self._take_cache(cache, cache.keys * layers, cache.values * layers)
        return np.arange(cache.num_blocks, dtype=np.int32)[None]

    # --- building the program ----------------------------------------------------------------------------------------

    def _keep(self, tensor: torch.Tensor) -> int:
        """The address of a tensor that stays."""
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _add(self, op: Op, *operands: int, rows: Rows = Rows.TOKENS, f0: float = 0.0, f1: float = 0.0) -> None:
        row = [int(op), int(rows), *(int(operand) for operand in operands)]
        self._code.append(row + [0] * (WIDTH - len(row)))
        self._numbers.append([f0, f1])

    def _call(self, function: Callable[[], None]) -> None:
        self._add(Op.CALL)
        self._code[-1][-1] = len(self._calls)
        self._calls.append(function)

    def _build(self, read: flat.Model) -> None:
        if read.embedding is not None:
            self._embed(read.embedding)
        for number in range(len(read.layers)):
            layer = read.layers.pop(0)  # so that its weights are freed before the next one's are laid out
            late = Rows.TOKENS if read.layers or read.head is None else Rows.LATE
            self._attention(read, number, layer, late)
            self._mlp(read, layer, late)
        if read.head is not None:
            assert read.norm is not None
            self._add(Op.PICK, Reg.X, Reg.PICKED, read.hidden, Reg.KEEP, rows=Rows.KEPT)
            self._norm(read.norm, Reg.PICKED, Reg.PICKED, read.hidden, rows=Rows.KEPT)
            self._product(read.head, Reg.PICKED, read.hidden, Reg.LOGITS, rows=Rows.KEPT)
            if read.final_softcap is not None:
                self._add(Op.SOFTCAP, Reg.LOGITS, self._vocab, rows=Rows.KEPT, f0=read.final_softcap)
        self._add(Op.END)

    def _embed(self, embedding: flat.Embedding) -> None:
        table = narrow_storage(embedding.weight.contiguous())
        self._tables.append(table)
        kind = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}[table.dtype]
        first = 0 if embedding.ids is None else embedding.ids.start
        self._add(Op.EMBED, Reg.X, self._hidden, self._keep(table), kind, first, table.shape[0])
        if embedding.group is not None:
            self._reduce(embedding.group, Reg.X)
        if embedding.scale is not None:
            self._add(Op.SCALE, Reg.X, self._hidden, f0=embedding.scale)

    def _attention(self, read: flat.Model, number: int, layer: flat.Layer, late: Rows) -> None:
        dim = read.head_dim
        rotated, stride = read.q_heads + read.kv_heads, (read.q_heads + 2 * read.kv_heads) * dim
        source = Reg.X
        if layer.before_attention is not None:
            source = Reg.H
            self._norm(layer.before_attention, Reg.X, Reg.H, read.hidden)
        self._product(layer.qkv, source, read.hidden, Reg.QKV)
        if layer.head_norms is not None:
            self._rms(layer.head_norms, Reg.QKV, stride, 0, rotated)
        for norm, first, heads in (
            (layer.query_norm, 0, read.q_heads),
            (layer.key_norm, read.q_heads, read.kv_heads),
        ):
            if norm is not None and norm.split is not None:
                self._call(self._split_norm(norm.split, first * dim, (first + heads) * dim))
            elif norm is not None:
                self._rms(norm, Reg.QKV, stride, first * dim, 1)
        if layer.rope is not None:
            width = read.rope[layer.rope].shape[-1]
            self._add(Op.ROTATE, Reg.QKV, stride, rotated, dim, self._rope[layer.rope], width)
        self._add(Op.WRITE, Reg.QKV, stride, read.q_heads * dim, read.kv_heads, dim, number)
        group, width = read.q_heads // read.kv_heads, read.q_heads * dim
        operands = Reg.QKV, stride, read.kv_heads, group, dim, number, Reg.ATTENDED, width, layer.window or 0
        requests = Reg.LATE_BATCH if late is Rows.LATE else Reg.BATCH
        self._add(Op.ATTEND, *operands, requests, f0=layer.scaling, f1=layer.softcap or 0.0)
        if late is Rows.LATE:
            self._add(Op.PICK, Reg.ATTENDED, Reg.ATTENDED, width, Reg.EARLY, rows=late)
            self._add(Op.PICK, Reg.X, Reg.X, read.hidden, Reg.EARLY, rows=late)
        if read.parallel and layer.before_mlp is not None:
            self._norm(layer.before_mlp, Reg.X, Reg.H, read.hidden, rows=late)  # of what the layer before left
        self._onto_hidden(layer.out, Reg.ATTENDED, width, layer.after_attention, late)

    def _mlp(self, read: flat.Model, layer: flat.Layer, rows: Rows) -> None:
        source = Reg.X
        if layer.before_mlp is not None:
            source = Reg.H
            if not read.parallel:
                self._norm(layer.before_mlp, Reg.X, Reg.H, read.hidden, rows=rows)
        self._product(layer.gate_up, source, read.hidden, Reg.UP, rows=rows)
        stride = layer.gate_up.weight.shape[0]
        width = stride // 2 if layer.gated else stride
        op = _ACTIVATIONS.get(type(layer.activation).__name__)
        if op is None:
            self._call(self._activation(layer.activation, width, layer.gated, rows))
        else:
            self._add(op, Reg.UP, stride, width, int(layer.gated), rows=rows)
        self._onto_hidden(layer.down, Reg.UP, stride, layer.after_mlp, rows)

    def _onto_hidden(self, matrix: flat.Matrix, source: Reg, stride: int, norm: flat.Norm | None, rows: Rows) -> None:
        """Add a product to the hidden states, after a sum over the group or a norm if there is one."""
        group = matrix.group if matrix.group is not None and matrix.group.size > 1 else None
        if group is None and norm is None:
            self._product(matrix, source, stride, Reg.X, add=True, rows=rows)
            return
        bias, matrix.bias = matrix.bias, None
        self._product(matrix, source, stride, Reg.DELTA, rows=rows)
        if group is not None:
            self._reduce(group, Reg.DELTA, rows)
        self._bias(bias, Reg.DELTA, self._hidden, rows=rows)
        if norm is not None:
            self._norm(norm, Reg.DELTA, Reg.DELTA, self._hidden, rows=rows)
        self._add(Op.ADD, Reg.X, Reg.DELTA, self._hidden, rows=rows)

    def _product(
        self,
        matrix: flat.Matrix,
        source: Reg,
        stride: int,
        to: Reg,
        *,
        add: bool = False,
        rows: Rows = Rows.TOKENS,
    ) -> None:
        panels = Panels(matrix.weight)
        self._panels.append(panels)
        features, inputs = matrix.weight.shape
        operands = source, stride, to, features, panels.address, panels.kind, features, inputs, int(add)
        self._add(Op.PRODUCT, *operands, rows=rows)
        self._bias(matrix.bias, to, features, rows=rows)

    def _bias(self, bias: torch.Tensor | None, to: Reg, width: int, rows: Rows = Rows.TOKENS) -> None:
        if bias is not None:
            self._add(Op.BIAS, to, width, self._keep(bias.float().contiguous()), width, rows=rows)

    def _norm(self, norm: flat.Norm, source: Reg, to: Reg, width: int, rows: Rows = Rows.TOKENS) -> None:
        if norm.rms:
            assert norm.weight is not None
            weight = self._keep(norm.weight.float().contiguous())
            self._add(Op.RMS_NORM, source, width, 0, to, width, 0, weight, 1, width, rows=rows, f0=norm.eps)
            return
        weight, bias = (
            0 if part is None else self._keep(part.float().contiguous()) for part in (norm.weight, norm.bias)
        )
        self._add(Op.LAYER_NORM, source, to, weight, bias, width, rows=rows, f0=norm.eps)

    def _rms(self, norm: flat.Norm, of: Reg, stride: int, offset: int, heads: int) -> None:
        """In place: over each of ``heads``, or over all that follows ``offset`` as one."""
        assert norm.weight is not None
        weight = self._keep(norm.weight.float().contiguous())
        self._add(
            Op.RMS_NORM, of, stride, offset, of, stride, offset, weight, heads, norm.weight.shape[-1], f0=norm.eps
        )

    # --- what is not compiled ----------------------------------------------------------------------------------------

    def _reduce(self, group: TPGroup, reg: Reg, rows: Rows = Rows.TOKENS) -> None:
        def call() -> None:
            number = int(self._registers[rows])
            if not number:
                return
            tensor = self._rows[0] if reg is Reg.X else self._buffers.view(reg, number)
            summed = group.all_reduce(tensor)
            if summed.data_ptr() != tensor.data_ptr():
                tensor.copy_(summed)

        one_shot = group.one_shot()
        if one_shot is None:
            self._call(call)
            return
        if not self._sums:
            self._sums.append(_Sum(one_shot))
        summing = self._sums[0]  # there is one group that sums
        self._add(Op.SUM, reg, self._hidden, summing.address, rows=rows)
        self._code[-1][-1] = len(self._calls)
        self._calls.append(lambda: summing.stopped(self._registers, call))

    def _split_norm(self, norm: nn.Module, start: int, stop: int) -> Callable[[], None]:
        def call() -> None:
            part = self._buffers.view(Reg.QKV, len(self._rows[0]))[:, start:stop]
            part.copy_(norm(part))

        return call

    def _activation(self, activation: nn.Module, width: int, gated: bool, rows: Rows) -> Callable[[], None]:
        def call() -> None:
            up = self._buffers.view(Reg.UP, int(self._registers[rows]))
            first = activation(up[:, :width])
            up[:, :width] = first * up[:, width : 2 * width] if gated else first

        return call
