"""Attention of a step's rows over the paged cache of one layer, as one compiled function.

Keys and values stay where they are: [blocks, Hkv, block, D], the layout of ``attention.KVCache``.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba.core import types

from drumline.model.kernels import vectors
from drumline.model.kernels.jit import floats, inlined, int32s, int64s
from drumline.model.kernels.vectors import WIDTH, instructions, integer, load, loop, pointer, store

PIECE = 256
"""Keys whose scores are held at once."""

_SCORES = PIECE + WIDTH
"""Floats between the scores of two heads: not a power of two, and dots() writes whole vectors."""

LINE = 16
"""Floats of a cache line."""

_INT, _FLOAT, _VOID = types.int64, types.float32, types.void


def scratch_floats(kv_heads: int, group: int, dim: int) -> int:
    """Scratch that :func:`attend` needs, whatever the rows are, in floats."""
    padded = -(-dim // WIDTH) * WIDTH
    return kv_heads * group * (_SCORES + 2 * padded + 2)


@instructions(_VOID, *[_INT] * 6)
def _dots(builder: ir.IRBuilder, query: Any, keys: Any, dim: Any, last: Any, ahead: Any, out: Any) -> None:
    """out[j] = query . keys[j] for 16 keys, of which those after ``last`` are not read (and are the last one instead).

    The query is padded with zeros. A step of the loop is 16 sums over 16 dimensions each. Where all keys are read, the
    same places from ``ahead`` on are fetched, unless that is 0.
    """

    def emit(key: Any, fetching: bool = False) -> None:
        def step(at: Any, totals: Any, mask: Any = None) -> list[Any]:
            part = load(builder, pointer(builder, query, at))
            new = []
            for j, total in enumerate(totals):
                place = builder.add(key(j), at)
                if fetching:
                    vectors.prefetch(builder, pointer(builder, ahead, place))
                new.append(vectors.fma(builder, load(builder, pointer(builder, keys, place), mask), part, total))
            return new

        whole = builder.and_(dim, integer(-WIDTH))
        totals = loop(builder, integer(0), whole, integer(WIDTH), [vectors.splat(0.0)] * WIDTH, step)
        rest = builder.sub(dim, whole)
        before = builder.block
        with builder.if_then(builder.icmp_signed(">", rest, integer(0)), likely=False):
            tail = step(whole, totals, vectors.below(builder, rest))
            inside = builder.block
        merged = []
        for total, other in zip(totals, tail, strict=True):
            phi = builder.phi(vectors.VECTOR)
            phi.add_incoming(total, before)
            phi.add_incoming(other, inside)
            merged.append(phi)
        store(builder, vectors.sums(builder, merged), pointer(builder, out, integer(0)))

    ones = [builder.mul(dim, integer(j)) for j in range(4)]
    fours = [builder.mul(dim, integer(4 * j)) for j in range(4)]
    with builder.if_else(builder.icmp_signed(">=", last, integer(WIDTH - 1))) as (all_keys, some):
        with all_keys:
            in_turn = lambda j: builder.add(fours[j // 4], ones[j % 4])  # few registers hold all places
            with builder.if_else(builder.icmp_signed("!=", ahead, integer(0))) as (fetching, plain):
                with fetching:
                    emit(in_turn, True)
                with plain:
                    emit(in_turn)
        with some:
            kept = [builder.select(builder.icmp_signed("<", integer(j), last), integer(j), last) for j in range(WIDTH)]
            emit(lambda j: builder.mul(dim, kept[j]))


@instructions(_VOID, _INT, _INT)
def _fetch(builder: ir.IRBuilder, address: Any, count: Any) -> None:
    """Ask for so many floats from an address on, unless that is 0."""

    def step(at: Any, state: Any) -> list[Any]:
        vectors.prefetch(builder, pointer(builder, address, at))
        return []

    with builder.if_then(builder.icmp_signed("!=", address, integer(0))):
        loop(builder, integer(0), count, integer(LINE), [], step)


def _values_tile(queries: int, chunks: int, masked: bool, fetching: bool) -> Any:
    """out[g] += the sum over j of weights[g, j] * values[j], for so many queries and vectors of a value."""
    unrolled = max(1, 8 // (queries * chunks))

    def tile(
        builder: ir.IRBuilder,
        values: Any,
        dim: Any,
        rest: Any,
        weights: Any,
        count: Any,
        ahead: Any,
        out: Any,
        padded: Any,
    ) -> None:
        mask = vectors.below(builder, rest) if masked else None

        def step(steps: int) -> Any:
            def body(j: Any, totals: Any) -> list[Any]:
                totals = list(totals)
                for u in range(steps):
                    at = builder.add(j, integer(u))
                    place = builder.mul(at, dim)
                    places = [builder.add(place, integer(WIDTH * c)) for c in range(chunks)]
                    if fetching:
                        for where in places:
                            vectors.prefetch(builder, pointer(builder, ahead, where))
                    parts = [load(builder, pointer(builder, values, where), mask) for where in places]
                    for g in range(queries):
                        where = builder.add(at, integer(g * _SCORES))
                        weight = builder.load(pointer(builder, weights, where), typ=vectors.FLOAT)
                        weight = vectors.spread(builder, weight)
                        for c in range(chunks):
                            n = (u * queries + g) * chunks + c
                            totals[n] = vectors.fma(builder, weight, parts[c], totals[n])
                return totals

            return body

        places = [
            pointer(builder, out, builder.add(builder.mul(padded, integer(g)), integer(WIDTH * c)))
            for g in range(queries)
            for c in range(chunks)
        ]
        size = len(places)
        totals = [load(builder, place) for place in places] + [vectors.splat(0.0)] * (size * (unrolled - 1))
        even = builder.and_(count, integer(-unrolled))
        totals = loop(builder, integer(0), even, integer(unrolled), totals, step(unrolled))
        if unrolled > 1:
            totals = loop(builder, even, count, integer(1), totals, step(1))
        for n, place in enumerate(places):
            parts = totals[n::size]
            while len(parts) > 1:
                parts = [builder.fadd(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)] + parts[
                    len(parts) & ~1 :
                ]
            store(builder, parts[0], place)

    return tile


@instructions(_VOID, *[_INT] * 8)
def _weighted(
    builder: ir.IRBuilder,
    values: Any,
    dim: Any,
    padded: Any,
    weights: Any,
    count: Any,
    ahead: Any,
    out: Any,
    queries: Any,
) -> None:
    """out[g, d] += the sum over j < count of weights[g, j] * values[j, d] for so many queries, d < dim.

    The places of values from ``ahead`` on are fetched.
    """

    def chunk(at: Any, chunks: int, masked: bool) -> None:
        rest = builder.sub(dim, at)
        part, later = (builder.add(address, builder.mul(at, integer(4))) for address in (values, ahead))

        def emit(g: Any, number: int) -> None:
            w = builder.ptrtoint(pointer(builder, weights, builder.mul(g, integer(_SCORES))), vectors.INT)
            o = builder.ptrtoint(pointer(builder, out, builder.add(builder.mul(g, padded), at)), vectors.INT)
            _values_tile(number, chunks, masked, True)(builder, part, dim, rest, w, count, later, o, padded)

        most = 4
        fours = builder.and_(queries, integer(-most))

        def body(g: Any, state: Any) -> list[Any]:
            emit(g, most)
            return []

        loop(builder, integer(0), fours, integer(most), [], body)
        left = builder.sub(queries, fours)
        for number in range(1, most):
            with builder.if_then(builder.icmp_signed("==", left, integer(number))):
                emit(fours, number)

    at = integer(0)
    for chunks in (4, 2, 1):
        end = builder.add(at, builder.and_(builder.sub(dim, at), integer(-chunks * WIDTH)))

        def body(at: Any, state: Any, chunks: int = chunks) -> list[Any]:
            chunk(at, chunks, False)
            return []

        loop(builder, at, end, integer(chunks * WIDTH), [], body)
        at = end
    with builder.if_then(builder.icmp_signed("<", at, dim)):
        chunk(at, 1, True)


@instructions(_FLOAT, _INT, _INT)
def _largest(builder: ir.IRBuilder, scores: Any, count: Any) -> Any:
    """Of so many scores, a multiple of 16."""

    def step(at: Any, state: Any) -> list[Any]:
        found = load(builder, pointer(builder, scores, at))
        return [builder.select(builder.fcmp_ordered(">", found, state[0]), found, state[0])]

    (best,) = loop(builder, integer(0), count, integer(WIDTH), [vectors.splat(-math.inf)], step)
    return vectors.call(builder, "llvm.vector.reduce.fmax.v16f32", vectors.FLOAT, [best])


@instructions(_FLOAT, _INT, _INT, _FLOAT)
def _weigh(builder: ir.IRBuilder, scores: Any, count: Any, largest: Any) -> Any:
    """Scores to e^(score - largest), their sum; so many, a multiple of 16."""
    largest = vectors.spread(builder, largest)

    def step(at: Any, state: Any) -> list[Any]:
        place = pointer(builder, scores, at)
        weights = vectors.exp(builder, builder.fsub(load(builder, place), largest))
        store(builder, weights, place)
        return [builder.fadd(state[0], weights)]

    (total,) = loop(builder, integer(0), count, integer(WIDTH), [vectors.splat(0.0)], step)
    return vectors.call(
        builder, "llvm.vector.reduce.fadd.v16f32", vectors.FLOAT, [ir.Constant(vectors.FLOAT, 0.0), total]
    )


@instructions(_VOID, _INT, _INT, _FLOAT)
def _cap(builder: ir.IRBuilder, scores: Any, count: Any, cap: Any) -> None:
    """Scores to tanh(score / cap) * cap; so many, a multiple of 16."""
    cap = vectors.spread(builder, cap)

    def step(at: Any, state: Any) -> list[Any]:
        place = pointer(builder, scores, at)
        capped = vectors.tanh(builder, builder.fdiv(load(builder, place), cap))
        store(builder, builder.fmul(capped, cap), place)
        return []

    loop(builder, integer(0), count, integer(WIDTH), [], step)


@instructions(_FLOAT, _FLOAT)
def _exp(builder: ir.IRBuilder, x: Any) -> Any:
    """e to the power of x, as :func:`_weigh` has it."""
    return builder.extract_element(vectors.exp(builder, vectors.spread(builder, x)), ir.Constant(ir.IntType(32), 0))


@inlined
def _decode(
    query: int,
    table: int,
    begin: int,
    end: int,
    keys: int,
    values: int,
    block: int,
    kv_heads: int,
    group: int,
    dim: int,
    scaling: float,
    softcap: float,
    out: int,
    coming: int,
    coming_count: int,
    scratch: int,
) -> None:
    """One query of each head over the keys from ``begin`` to ``end``, where they are: blocks in turn, then heads."""
    heads = kv_heads * group
    last = (end + block - 1) // block
    padded = (dim + WIDTH - 1) // WIDTH * WIDTH
    blocks, head_size, block_size = int32s(table), 4 * block * dim, 4 * kv_heads * block * dim
    scaled, sums = scratch, scratch + 4 * heads * padded
    scores = sums + 4 * heads * padded
    largest, totals = floats(scores + 4 * heads * _SCORES), floats(scores + 4 * heads * (_SCORES + 1))
    for head in range(heads):
        source, to, total = (
            floats(query + 4 * head * dim),
            floats(scaled + 4 * head * padded),
            floats(sums + 4 * head * padded),
        )
        for d in range(dim):
            to[d] = source[d] * scaling
        for d in range(dim, padded):
            to[d] = 0
        for d in range(padded):
            total[d] = 0
        largest[head], totals[head] = -math.inf, 0
    for low in range(begin, end, PIECE):
        high = min(low + PIECE, end)
        begins, ends = low // block, (high + block - 1) // block
        nth, inside, at = low // block, low % block, low
        while at < high:
            size = min(block - inside, high - at, WIDTH)
            there = keys + blocks[nth] * block_size + 4 * inside * dim
            ahead = 0
            if nth + 1 < ends:
                ahead = keys + blocks[nth + 1] * block_size + 4 * inside * dim
            elif nth + 1 - ends + begins < ends:
                ahead = values + blocks[nth + 1 - ends + begins] * block_size + 4 * inside * dim
            for head in range(kv_heads):
                if ahead and size < WIDTH:
                    _fetch(ahead, (block - inside) * dim)
                fetched = ahead
                for member in range(head * group, (head + 1) * group):
                    place = scores + 4 * (member * _SCORES + at - low)
                    _dots(scaled + 4 * member * padded, there, dim, size - 1, fetched, place)
                    fetched = 0
                there += head_size
                ahead += head_size if ahead else 0
            at += size
            inside += size
            if inside == block:
                nth, inside = nth + 1, 0
        count = (high - low + WIDTH - 1) // WIDTH * WIDTH
        for head in range(heads):
            mine = scores + 4 * head * _SCORES
            if softcap > 0:
                _cap(mine, count, softcap)
            for place in range(high - low, count):
                floats(mine)[place] = -math.inf
            before = largest[head]
            best = max(before, _largest(mine, count))
            largest[head] = best
            total = _weigh(mine, count, best)
            if low > begin and best > before:
                scale = _exp(before - best)
                total += totals[head] * scale
                mine_sums = floats(sums + 4 * head * padded)
                for d in range(padded):
                    mine_sums[d] *= scale
            else:
                total += totals[head]
            totals[head] = total
        nth, inside, at = low // block, low % block, low
        while at < high:
            size = min(block - inside, high - at)
            there = values + blocks[nth] * block_size + 4 * inside * dim
            ahead = 0
            if nth + 1 < ends:
                ahead = values + blocks[nth + 1] * block_size
            elif nth + 1 < last:
                ahead = keys + blocks[nth + 1] * block_size
            elif nth + 1 - last < coming_count:
                ahead = keys + int32s(coming)[nth + 1 - last] * block_size
            for head in range(kv_heads):
                first = head * group
                weights = scores + 4 * (first * _SCORES + at - low)
                _weighted(there, dim, padded, weights, size, ahead or there, sums + 4 * first * padded, group)
                if ahead and size < block:
                    _fetch(ahead + 4 * size * dim, (block - size) * dim)
                there += head_size
                ahead += head_size if ahead else 0
            at, inside, nth = at + size, 0, nth + 1
    for head in range(heads):
        result, total = floats(out + 4 * head * dim), floats(sums + 4 * head * padded)
        scale = 1 / totals[head]
        for d in range(dim):
            result[d] = total[d] * scale


@inlined
def attend(
    q: int,
    q_stride: int,
    num_rows: int,
    first: int,
    count: int,
    computed: int,
    tables: int,
    table_stride: int,
    keys: int,
    values: int,
    block: int,
    kv_heads: int,
    group: int,
    dim: int,
    scaling: float,
    window: int,
    softcap: float,
    out: int,
    out_stride: int,
    scratch: int,
) -> None:
    """Query i of row b sees its keys up to ``computed[b] + i``, the last ``window`` of them if that is not 0."""
    for row in range(num_rows):
        start, context = int64s(first)[row], int64s(computed)[row]
        table = tables + 4 * row * table_stride
        coming, coming_count = 0, 0
        if row + 1 < num_rows:
            after = int64s(computed)[row + 1] + 1
            skipped = max(after - window, 0) // block if window > 0 else 0
            coming = table + 4 * (table_stride + skipped)
            coming_count = (after + block - 1) // block - skipped
        for i in range(int64s(count)[row]):
            end = context + i + 1
            begin = max(end - window, 0) if window > 0 else 0
            _decode(
                q + 4 * (start + i) * q_stride,
                table,
                begin,
                end,
                keys,
                values,
                block,
                kv_heads,
                group,
                dim,
                scaling,
                softcap,
                out + 4 * (start + i) * out_stride,
                coming,
                coming_count,
                scratch,
            )
