"""A forward as a program: instructions of a few numbers each, and one compiled function that runs them.

A step calls :func:`run` once. It comes back at the end, at a ``CALL``, where Python has something to do that is not
compiled, or at a ``SUM`` over the ranks of a group whose others are late, and is called again. So a step on one rank is
one call without the interpreter's lock, whatever the model is made of; what it is made of is decided once, by
``model.compiled``.

An instruction is a row of ``WIDTH`` int64: operation, rows it is for (``Rows``), operands; and a row of two float64.
Operands that are buffers are numbers of registers, which hold addresses; weights are addresses. Layouts are in
:class:`Op`. Rejected: one compiled function for each architecture (seconds of compiling for each), and one call for
each operation (8 calls a layer; 0.3 us each while hot, but 3 to 5 between the weights of two layers).
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from drumline.model.kernels.attention import attend
from drumline.model.kernels.jit import floats, halves, inlined, int32s, int64s, kernel
from drumline.model.kernels.memory import fence, load_word, pause, store_word
from drumline.model.kernels.numbers import exp, float_of_bfloat16, float_of_float16
from drumline.model.kernels.products import product

Longs = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]

WIDTH = 14
"""Numbers of an instruction."""


class Rows(IntEnum):
    """How many rows an instruction works on."""

    TOKENS = 0
    """All of the step."""
    KEPT = 1
    """Those whose logits are wanted."""
    LATE = 2
    """Those that the last layer goes on with once it has written its keys and values."""


class Op(IntEnum):
    """Operations. Operands from number 2 on; ``f0``, ``f1`` are the float operands."""

    END = 0
    CALL = 1
    """Which call."""
    EMBED = 2
    """to, width, table, kind, first id, ids. Ids outside of the table's give zeros."""
    SCALE = 3
    """of, width; f0."""
    RMS_NORM = 4
    """from, its stride, offset, to, its stride, offset, weight [heads, width], heads, width; f0: epsilon."""
    LAYER_NORM = 5
    """from, to, weight, bias, width; f0: epsilon. 0: no weight or bias."""
    PRODUCT = 6
    """from, its stride, to, its stride, panels, kind, features, inputs, mode."""
    BIAS = 7
    """of, stride, bias, width."""
    ADD = 8
    """to, from, width."""
    ROTATE = 9
    """of, stride, heads, dim, table, rotated."""
    WRITE = 10
    """from, stride, offset of keys, KV heads, dim, layer."""
    ATTEND = 11
    """queries, stride, KV heads, group, dim, layer, to, its stride, window, register of the requests' number (``BATCH``
    or ``LATE_BATCH``); f0: scaling, f1: soft cap (0: none)."""
    SILU = 12
    """of, stride, width, gated. Gated: the second ``width`` numbers times that of the first, else alone."""
    GELU_TANH = 13
    """As SILU."""
    GELU = 14
    """As SILU."""
    PICK = 15
    """from, to, width, register with the address of the rows' places (int64, in order if from is to; 0: all as they
    are)."""
    SOFTCAP = 16
    """of, width; f0."""
    SUM = 17
    """of, width, group: address of a :class:`Sum`."""


class Stop(IntEnum):
    """Why a ``SUM`` came back (register PHASE), and where it goes on when it is run again."""

    START = 0
    WAKE = 1
    """All have come, some sleep: to be woken; then go on at READ."""
    WAIT = 2
    """Looked often enough: to wait asleep; then go on at READ."""
    LARGE = 3
    """Not for one shot: to be summed otherwise; then go on behind the ``SUM``."""
    READ = 4


class Sum(IntEnum):
    """Numbers (int64) that describe a group to ``SUM``; see ``parallel.shm.OneShot``."""

    SIZE = 0
    PLACE = 1
    MOST_BYTES = 2
    LOOKS = 3
    TURN = 4
    NUMBER = 5
    OWN = 6
    WORDS = 7
    """Of the SIZE - 1 others; then the slots: of each turn, all SIZE members'."""


class Reg(IntEnum):
    """Registers. Buffers are [rows, width], addresses of float32."""

    TOKENS = 0
    KEPT = 1
    LATE = 2
    BATCH = 3
    """Number of requests' rows; then their first rows, counts, computed tokens and block tables."""
    FIRST = 4
    COUNT = 5
    COMPUTED = 6
    TABLES = 7
    LATE_BATCH = 8
    """The same for late rows."""
    LATE_FIRST = 9
    LATE_COUNT = 10
    LATE_COMPUTED = 11
    LATE_TABLES = 12
    TABLE_STRIDE = 13
    IDS = 14
    POSITIONS = 15
    EARLY = 16
    """Address of the places of late rows, which the last layer picks; 0: all rows are late."""
    KEEP = 17
    """Address of the places of kept rows among the late ones; 0: they are the late ones."""
    BLOCK = 18
    SCRATCH = 19
    X = 20
    """Hidden states."""
    H = 21
    """What a norm gives."""
    QKV = 22
    ATTENDED = 23
    UP = 24
    DELTA = 25
    """What is added to the hidden states, where more happens to it first."""
    PICKED = 26
    LOGITS = 27
    PHASE = 28
    CACHE = 29
    """From here on: keys and values of each layer."""


_END, _CALL, _EMBED, _SCALE, _RMS, _LAYER = (int(op) for op in list(Op)[:6])
_PRODUCT, _BIAS, _ADD, _ROTATE, _WRITE, _ATTEND = (int(op) for op in list(Op)[6:12])
_SILU, _GELU_TANH, _GELU, _PICK, _SOFTCAP, _SUM = (int(op) for op in list(Op)[12:])
_TABLE_STRIDE, _IDS, _POSITIONS, _BLOCK, _SCRATCH, _PHASE, _CACHE = (
    int(reg) for reg in (Reg.TABLE_STRIDE, Reg.IDS, Reg.POSITIONS, Reg.BLOCK, Reg.SCRATCH, Reg.PHASE, Reg.CACHE)
)
_BATCH, _FIRST, _COUNT, _COMPUTED, _TABLES = (int(reg) for reg in list(Reg)[Reg.BATCH : Reg.TABLES + 1])
_START, _WAKE, _WAIT, _LARGE, _READ = (int(stop) for stop in Stop)
_SIZE, _PLACE, _MOST_BYTES, _LOOKS, _TURN, _NUMBER, _OWN, _WORDS = (int(place) for place in Sum)


@inlined
def _embed(ids: int, rows: int, to: int, width: int, table: int, kind: int, first_id: int, num_ids: int) -> None:
    for row in range(rows):
        number = int64s(ids)[row] - first_id
        out = floats(to + 4 * row * width)
        if number < 0 or number >= num_ids:
            for i in range(width):
                out[i] = np.float32(0)
        elif kind == 0:
            source = floats(table + 4 * number * width)
            for i in range(width):
                out[i] = source[i]
        elif kind == 1:
            half = halves(table + 2 * number * width)
            for i in range(width):
                out[i] = float_of_bfloat16(half[i])
        else:
            half = halves(table + 2 * number * width)
            for i in range(width):
                out[i] = float_of_float16(half[i])


@inlined
def _rms_norm(
    source: int,
    source_stride: int,
    to: int,
    to_stride: int,
    weight: int,
    heads: int,
    width: int,
    eps: float,
    rows: int,
) -> None:
    factors = floats(weight)
    for row in range(rows):
        for head in range(heads):
            a = floats(source + 4 * (row * source_stride + head * width))
            out = floats(to + 4 * (row * to_stride + head * width))
            squares = np.float32(0)
            for i in range(width):
                squares += a[i] * a[i]
            scale = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(eps))
            base = head * width
            for i in range(width):
                out[i] = a[i] * scale * factors[base + i]


@inlined
def _layer_norm(source: int, to: int, weight: int, bias: int, width: int, eps: float, rows: int) -> None:
    for row in range(rows):
        a, out = floats(source + 4 * row * width), floats(to + 4 * row * width)
        total = np.float32(0)
        for i in range(width):
            total += a[i]
        mean = total / np.float32(width)
        squares = np.float32(0)
        for i in range(width):
            squares += (a[i] - mean) * (a[i] - mean)
        scale = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(eps))
        for i in range(width):
            out[i] = (a[i] - mean) * scale
        if weight != 0:
            factors = floats(weight)
            for i in range(width):
                out[i] = out[i] * factors[i]
        if bias != 0:
            terms = floats(bias)
            for i in range(width):
                out[i] = out[i] + terms[i]


@inlined
def _rotate(of: int, stride: int, heads: int, dim: int, table: int, rotated: int, positions: int, rows: int) -> None:
    half = rotated // 2
    for row in range(rows):
        cosines = floats(table + 8 * int64s(positions)[row] * rotated)
        sines = floats(table + 8 * int64s(positions)[row] * rotated + 4 * rotated)
        for head in range(heads):
            first = floats(of + 4 * (row * stride + head * dim))
            second = floats(of + 4 * (row * stride + head * dim + half))
            for i in range(half):
                a, b = first[i], second[i]
                first[i] = a * cosines[i] - b * sines[i]
                second[i] = b * cosines[i] + a * sines[i]


@inlined
def _write(source: int, stride: int, offset: int, kv_heads: int, dim: int, keys: int, values: int, regs: Longs) -> None:
    block = regs[_BLOCK]
    for row in range(regs[_BATCH]):
        table = int32s(regs[_TABLES] + 4 * row * regs[_TABLE_STRIDE])
        start, context = int64s(regs[_FIRST])[row], int64s(regs[_COMPUTED])[row]
        for i in range(int64s(regs[_COUNT])[row]):
            position = context + i
            place = np.int64(table[position // block]) * kv_heads * block + position % block
            for head in range(kv_heads):
                source_key = floats(source + 4 * ((start + i) * stride + offset + head * dim))
                source_value = floats(source + 4 * ((start + i) * stride + offset + (kv_heads + head) * dim))
                key = floats(keys + 4 * (place + head * block) * dim)
                value = floats(values + 4 * (place + head * block) * dim)
                for d in range(dim):
                    key[d] = source_key[d]
                for d in range(dim):
                    value[d] = source_value[d]


@inlined
def _silu(x: Any) -> Any:
    return x / (np.float32(1) + exp(-x))


@inlined
def _gelu_tanh(x: Any) -> Any:
    inner = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
    # x / 2 * (1 + tanh(inner)), and 1 + tanh(u) is 2 / (1 + exp(-2 u))
    return x / (np.float32(1) + exp(np.float32(-2) * inner))


@inlined
def _gelu(x: Any) -> Any:
    return np.float32(0.5) * x * (np.float32(1) + np.float32(math.erf(x * np.float32(0.7071067811865476))))


@inlined
def _activate(op: int, of: int, stride: int, width: int, gated: int, rows: int) -> None:
    for row in range(rows):
        a, b = floats(of + 4 * row * stride), floats(of + 4 * (row * stride + width))
        if op == _SILU:
            if gated:
                for i in range(width):
                    a[i] = _silu(a[i]) * b[i]
            else:
                for i in range(width):
                    a[i] = _silu(a[i])
        elif op == _GELU_TANH:
            if gated:
                for i in range(width):
                    a[i] = _gelu_tanh(a[i]) * b[i]
            else:
                for i in range(width):
                    a[i] = _gelu_tanh(a[i])
        else:
            for i in range(width):
                a[i] = _gelu(a[i])
            if gated:
                for i in range(width):
                    a[i] = a[i] * b[i]


@inlined
def _behind(group: Any, number: int) -> bool:
    """Whether one of the others has not come to meeting ``number``."""
    behind = 0
    for i in range(group[_SIZE] - 1):
        behind |= (load_word(group[_WORDS + i]) - number) & 0x80000000
    return behind != 0


@inlined
def _sum(descriptor: int, of: int, count: int, phase: int) -> int:
    """A one-shot sum, as ``parallel.shm`` does it; START when it is done, else why it stops."""
    group = int64s(descriptor)
    size, place, tensor = group[_SIZE], group[_PLACE], floats(of)
    if phase == _START:
        if 4 * count > group[_MOST_BYTES]:
            return _LARGE
        group[_TURN] = (group[_TURN] + 1) % 3
        mine = floats(group[_WORDS + size - 1 + group[_TURN] * size + place])
        for i in range(count):
            mine[i] = tensor[i]
        group[_NUMBER] = number = (group[_NUMBER] + 1) & 0xFFFFFFFF
        fence()
        store_word(group[_OWN], number)
        fence()
        if not _behind(group, number):
            for i in range(size - 1):
                if load_word(group[_WORDS + i] + 4):
                    return _WAKE
    if phase != _READ:
        looks = group[_LOOKS]
        while _behind(group, group[_NUMBER]):
            if looks == 0:
                return _WAIT
            looks -= 1
            pause()
    fence()
    slots = _WORDS + size - 1 + group[_TURN] * size
    if size == 2:  # the sum of two is the same either way round
        other = floats(group[slots + 1 - place])
        for i in range(count):
            tensor[i] = tensor[i] + other[i]
        return _START
    first, second = floats(group[slots]), floats(group[slots + 1])
    for i in range(count):
        tensor[i] = first[i] + second[i]
    for member in range(2, size):
        other = floats(group[slots + member])
        for i in range(count):
            tensor[i] = tensor[i] + other[i]
    return _START


@kernel
def run(code: Longs, numbers: Doubles, regs: Longs, pc: int) -> int:
    """Run from instruction ``pc`` on; the number of the ``CALL``, ``SUM`` or ``END`` it stopped at."""
    scratch = regs[_SCRATCH]
    while True:
        op = code[pc, 0]
        rows = regs[code[pc, 1]]
        a, b, c, d, e = code[pc, 2], code[pc, 3], code[pc, 4], code[pc, 5], code[pc, 6]
        f, g, h, i, j = code[pc, 7], code[pc, 8], code[pc, 9], code[pc, 10], code[pc, 11]
        f0, f1 = numbers[pc, 0], numbers[pc, 1]
        if op == _PRODUCT:
            if rows:  # no logits may be wanted
                product(regs[a], b, rows, e, f, g, h, regs[c], d, i, scratch)
        elif op == _RMS:
            _rms_norm(regs[a] + 4 * c, b, regs[d] + 4 * f, e, g, h, i, f0, rows)
        elif op == _ATTEND:
            attend(
                regs[a],
                b,
                regs[j],
                regs[j + 1],
                regs[j + 2],
                regs[j + 3],
                regs[j + 4],
                regs[_TABLE_STRIDE],
                regs[_CACHE + 2 * f],
                regs[_CACHE + 2 * f + 1],
                regs[_BLOCK],
                c,
                d,
                e,
                f0,
                i,
                f1,
                regs[g],
                h,
                scratch,
            )
        elif op == _ROTATE:
            _rotate(regs[a], b, c, d, e, f, regs[_POSITIONS], rows)
        elif op == _WRITE:
            if regs[_BLOCK] > 0:
                _write(regs[a], b, c, d, e, regs[_CACHE + 2 * f], regs[_CACHE + 2 * f + 1], regs)
        elif op in (_SILU, _GELU_TANH, _GELU):
            _activate(op, regs[a], b, c, d, rows)
        elif op == _SUM:
            phase = regs[_PHASE]
            if phase != _LARGE:
                phase = _sum(c, regs[a], rows * b, phase)
                regs[_PHASE] = phase
                if phase != _START:
                    return pc
            regs[_PHASE] = _START
        elif op == _ADD:
            to, source = floats(regs[a]), floats(regs[b])
            for n in range(rows * c):
                to[n] = to[n] + source[n]
        elif op == _BIAS:
            terms = floats(c)
            for row in range(rows):
                to = floats(regs[a] + 4 * row * b)
                for n in range(d):
                    to[n] = to[n] + terms[n]
        elif op == _EMBED:
            _embed(regs[_IDS], rows, regs[a], b, c, d, e, f)
        elif op == _LAYER:
            _layer_norm(regs[a], regs[b], c, d, e, f0, rows)
        elif op == _PICK:
            if regs[d] or a != b:
                for row in range(rows):
                    place = int64s(regs[d])[row] if regs[d] else row
                    to, source = floats(regs[b] + 4 * row * c), floats(regs[a] + 4 * place * c)
                    for n in range(c):
                        to[n] = source[n]
        elif op == _SCALE:
            to = floats(regs[a])
            for n in range(rows * b):
                to[n] = to[n] * np.float32(f0)
        elif op == _SOFTCAP:
            to, cap = floats(regs[a]), np.float32(f0)
            for n in range(rows * b):
                to[n] = np.float32(math.tanh(to[n] / cap)) * cap
        else:
            return pc
        pc += 1


SIGNATURE = numba.int64(numba.int64[:, ::1], numba.float64[:, ::1], numba.int64[::1], numba.int64)
"""Of :func:`run`, to compile it ahead of the first step."""
