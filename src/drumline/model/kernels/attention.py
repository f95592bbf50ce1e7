"""Attention of a step's rows over the paged cache of one layer, as one compiled function.

Keys and values stay where they are: [blocks, Hkv, block, D], the layout of ``attention.KVCache``. Two ways:

- Decoding rows (:func:`_decode`) read each block once, for all queries of a KV head together: scores of at most
  ``PIECE`` keys, their softmax, the values; a longer row goes on with the next piece and scales what it has. Reading is
  the cost (20 to 22 GB/s of blocks in any order, where a plain sum over the same blocks takes 25), so each block's next
  one is fetched meanwhile, line by line between the arithmetic. Rejected: to fetch it at once (a plain sum with such
  fetches is 12% slower than with ones in between), two blocks ahead (no gain). Into which cache is a matter of the
  processor (``NEAREST``): blocks of 8 KiB in random order from memory, summed, with a Zen 4: 8.5 GB/s without fetches,
  9.2 into the first cache, whose few pending misses they take from the loads, 14.7 into the second; with a Sapphire
  Rapids the second is the slower one.
- Prompts (:func:`_prompt`) are matrix products of ``products.tile``: pieces of keys and values are packed into panels,
  strips of queries take scores, softmax and sums over them. A strip takes the panels that it may see and no others.

It rests on: places that no query sees (after a row's end, other rows' blocks) may hold anything, NaN too: they are
either not read, or their scores are replaced before anything is made of them. Softmax is to base 2, with log2(e) in the
queries' scale. A sum over the lanes of a vector is the dear part of a score; :func:`vectors.sums` makes 16 at once.
"""

from __future__ import annotations

import math
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import types

from drumline.model.kernels import vectors
from drumline.model.kernels.jit import floats, inlined, int32s, int64s
from drumline.model.kernels.products import PANEL, TILE, tile
from drumline.model.kernels.vectors import WIDTH, instructions, integer, load, loop, pointer, store

PIECE = 256
"""Keys whose scores are held at once."""

_SCORES = PIECE + 2 * WIDTH
"""Floats between the scores of two queries: not a power of two, and whole vectors are written."""

LINE = 16
"""Floats of a cache line."""

NEAREST = 2 if llvmlite.binding.get_host_cpu_name().startswith("znver") else 3
"""The cache into which blocks are fetched (``vectors.prefetch``)."""

_COLUMNS = max(PANEL, WIDTH)
"""Keys and dimensions are padded to this many."""

_LOG2_E = math.log2(math.e)

_INT, _FLOAT, _VOID = types.int64, types.float32, types.void


QUERY_ROWS = 256
"""Queries of one KV head that a piece of a prompt has, of all its query heads together, or those of one token."""

STRIP = 2 * TILE
"""Queries whose scores are held at once."""

FEW = 3
"""Rows with fewer tokens are treated as decoding ones, each token by itself."""


def scratch_floats(kv_heads: int, group: int, dim: int) -> int:
    """Scratch that :func:`attend` needs, whatever the rows are, in floats."""
    padded, panels = -(-dim // WIDTH) * WIDTH, -(-dim // _COLUMNS) * _COLUMNS
    decoding = kv_heads * group * (_SCORES + 2 * padded + 2)
    queries = max(QUERY_ROWS // group, 1) * group
    prompts = queries * (padded + panels + 2) + STRIP * _SCORES + PIECE * (padded + panels) + 2 * WIDTH
    return max(decoding, prompts) + WIDTH


@instructions(_VOID, *[_INT] * 6)
def _dots(builder: ir.IRBuilder, query: Any, keys: Any, dim: Any, last: Any, ahead: Any, out: Any) -> None:
    """out[j] = query . keys[j] for 16 keys, of which those after ``last`` are not read (and are the last one instead).

    The query is padded with zeros. A step of the loop is 16 sums over 16 dimensions each. The same places from
    ``ahead`` on are fetched, where there are whole vectors.
    """

    def emit(key: Any, masked: bool) -> None:
        def step(at: Any, totals: Any) -> list[Any]:
            part = load(builder, pointer(builder, query, at))
            mask = vectors.below(builder, builder.sub(dim, at)) if masked else None
            new = []
            for j, total in enumerate(totals):
                place = builder.add(key(j), at)
                if not masked:
                    vectors.prefetch(builder, pointer(builder, ahead, place), NEAREST)
                new.append(vectors.fma(builder, load(builder, pointer(builder, keys, place), mask), part, total))
            return new

        totals = loop(builder, integer(0), dim, integer(WIDTH), [vectors.splat(0.0)] * WIDTH, step)
        store(builder, vectors.sums(builder, totals), pointer(builder, out, integer(0)))

    ones = [builder.mul(dim, integer(j)) for j in range(4)]
    fours = [builder.mul(dim, integer(4 * j)) for j in range(4)]
    all_keys = builder.icmp_signed(">=", last, integer(WIDTH - 1))
    all_lanes = builder.icmp_signed("==", builder.and_(dim, integer(WIDTH - 1)), integer(0))
    with builder.if_else(builder.and_(all_keys, all_lanes)) as (whole, partly):
        with whole:
            emit(lambda j: builder.add(fours[j // 4], ones[j % 4]), False)  # few registers hold all places
        with partly:
            kept = [builder.select(builder.icmp_signed("<", integer(j), last), integer(j), last) for j in range(WIDTH)]
            emit(lambda j: builder.mul(dim, kept[j]), True)


@instructions(_VOID, _INT, _INT)
def _fetch(builder: ir.IRBuilder, address: Any, count: Any) -> None:
    """Ask for so many floats from an address on, unless that is 0."""

    def step(at: Any, state: Any) -> list[Any]:
        vectors.prefetch(builder, pointer(builder, address, at), NEAREST)
        return []

    with builder.if_then(builder.icmp_signed("!=", address, integer(0))):
        loop(builder, integer(0), count, integer(LINE), [], step)


def _values_tile(queries: int, chunks: int, masked: bool) -> Any:
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
            def body(j: Any, state: Any) -> list[Any]:
                totals: list[Any] = list(state)
                for u in range(steps):
                    at = builder.add(j, integer(u))
                    place = builder.mul(at, dim)
                    places = [builder.add(place, integer(WIDTH * c)) for c in range(chunks)]
                    for where in places:
                        vectors.prefetch(builder, pointer(builder, ahead, where), NEAREST)
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
            _values_tile(number, chunks, masked)(builder, part, dim, rest, w, count, later, o, padded)

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

    def step(chunks: int, masked: bool) -> Any:
        def body(at: Any, state: Any) -> list[Any]:
            chunk(at, chunks, masked)
            return []

        return body

    whole = builder.and_(dim, integer(-2 * WIDTH))
    loop(builder, integer(0), whole, integer(2 * WIDTH), [], step(2, False))
    loop(builder, whole, dim, integer(WIDTH), [], step(1, True))


@instructions(_VOID, _INT, _INT)
def _mask(builder: ir.IRBuilder, scores: Any, count: Any) -> None:
    """The first so many of sixteen scores become -inf, or if that is negative the last."""
    place = pointer(builder, scores, integer(0))
    first = vectors.below(builder, count)
    last = builder.not_(vectors.below(builder, builder.add(count, integer(WIDTH))))
    lowest = vectors.splat(-math.inf)
    value = builder.select(builder.or_(first, last), lowest, load(builder, place))
    store(builder, value, place)


@instructions(_FLOAT, _INT, _INT)
def _largest(builder: ir.IRBuilder, scores: Any, count: Any) -> Any:
    """Of so many scores, a multiple of 16."""

    def larger(a: Any, b: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    def step(at: Any, state: Any) -> list[Any]:
        return [
            larger(load(builder, pointer(builder, scores, builder.add(at, integer(WIDTH * n)))), best)
            for n, best in enumerate(state)
        ]

    even = builder.and_(count, integer(-4 * WIDTH))
    a, b, c, d = loop(builder, integer(0), even, integer(4 * WIDTH), [vectors.splat(-math.inf)] * 4, step)
    (best,) = loop(builder, even, count, integer(WIDTH), [larger(larger(a, b), larger(c, d))], step)
    return vectors.call(builder, "llvm.vector.reduce.fmax.v16f32", vectors.FLOAT, [best])


@instructions(_FLOAT, _INT, _INT, _FLOAT)
def _weigh(builder: ir.IRBuilder, scores: Any, count: Any, largest: Any) -> Any:
    """Scores to 2^(score - largest), their sum; so many, a multiple of 16."""
    largest = vectors.spread(builder, largest)

    def step(at: Any, state: Any) -> list[Any]:
        place = pointer(builder, scores, at)
        weights = vectors.power_of_two(builder, builder.fsub(load(builder, place), largest))
        store(builder, weights, place)
        return [builder.fadd(state[0], weights)]

    (total,) = loop(builder, integer(0), count, integer(WIDTH), [vectors.splat(0.0)], step)
    zero = ir.Constant(vectors.FLOAT, 0.0)
    return vectors.call(builder, "llvm.vector.reduce.fadd.v16f32", vectors.FLOAT, [zero, total])


@instructions(_VOID, _INT, _INT, _FLOAT)
def _cap(builder: ir.IRBuilder, scores: Any, count: Any, cap: Any) -> None:
    """Scores to tanh(score) * cap; so many, a multiple of 16."""
    cap = vectors.spread(builder, cap)

    def step(at: Any, state: Any) -> list[Any]:
        place = pointer(builder, scores, at)
        store(builder, builder.fmul(vectors.tanh(builder, load(builder, place)), cap), place)
        return []

    loop(builder, integer(0), count, integer(WIDTH), [], step)


@instructions(_FLOAT, _FLOAT)
def _power_of_two(builder: ir.IRBuilder, x: Any) -> Any:
    """2 to the power of x, as :func:`_weigh` has it."""
    powers = vectors.power_of_two(builder, vectors.spread(builder, x))
    return builder.extract_element(powers, ir.Constant(ir.IntType(32), 0))


@instructions(_VOID, _INT, _INT, _FLOAT, _INT)
def _scale(builder: ir.IRBuilder, source: Any, count: Any, factor: Any, to: Any) -> None:
    """to[i] = source[i] * factor for i < count; both may be the same."""
    factor = vectors.spread(builder, factor)

    def step(at: Any, state: Any, mask: Any = None) -> list[Any]:
        value = load(builder, pointer(builder, source, at), mask)
        store(builder, builder.fmul(value, factor), pointer(builder, to, at), mask)
        return []

    whole = builder.and_(count, integer(-WIDTH))
    loop(builder, integer(0), whole, integer(WIDTH), [], step)
    with builder.if_then(builder.icmp_signed("<", whole, count), likely=False):
        step(whole, [], vectors.below(builder, builder.sub(count, whole)))


@instructions(_VOID, _INT, _INT)
def _clear(builder: ir.IRBuilder, address: Any, count: Any) -> None:
    """Set floats to zero; so many, a multiple of 16."""

    def step(at: Any, state: Any) -> list[Any]:
        store(builder, vectors.splat(0.0), pointer(builder, address, at))
        return []

    loop(builder, integer(0), count, integer(WIDTH), [], step)


def _store_columns(builder: ir.IRBuilder, value: Any, out: Any, at: Any, between: Any) -> None:
    """Sixteen floats of a row of panels; ``between``: floats from one panel to the next, where one is narrower."""
    for n in range(_COLUMNS // PANEL if PANEL < WIDTH else 1):
        lanes = [lane + n * PANEL for lane in range(min(PANEL, WIDTH))]
        part = builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))
        store(builder, part, pointer(builder, out, builder.add(at, builder.mul(between, integer(n)))))


@instructions(_VOID, *[_INT] * 4)
def _pack_keys(builder: ir.IRBuilder, addresses: Any, dim: Any, between: Any, out: Any) -> None:
    """Sixteen keys at these addresses to sixteen columns of a panel [dim, PANEL], whose rows are padded to 16."""
    places = [builder.load(pointer(builder, addresses, integer(2 * j)), typ=vectors.INT) for j in range(WIDTH)]

    def step(at: Any, state: Any, mask: Any = None) -> list[Any]:
        rows = [load(builder, pointer(builder, place, at), mask) for place in places]
        for n, column in enumerate(vectors.transposed(builder, rows)):
            _store_columns(builder, column, out, builder.mul(builder.add(at, integer(n)), integer(PANEL)), between)
        return []

    whole = builder.and_(dim, integer(-WIDTH))
    loop(builder, integer(0), whole, integer(WIDTH), [], step)
    with builder.if_then(builder.icmp_signed("<", whole, dim), likely=False):
        step(whole, [], vectors.below(builder, builder.sub(dim, whole)))


@instructions(_VOID, *[_INT] * 4)
def _pack_values(builder: ir.IRBuilder, addresses: Any, dim: Any, between: Any, out: Any) -> None:
    """Sixteen values at these addresses to sixteen rows of panels [keys, PANEL], ``between`` floats apart."""
    places = [builder.load(pointer(builder, addresses, integer(2 * j)), typ=vectors.INT) for j in range(WIDTH)]

    def step(at: Any, state: Any, mask: Any = None) -> list[Any]:
        panel, column = builder.udiv(at, integer(PANEL)), builder.urem(at, integer(PANEL))
        to = builder.add(builder.mul(panel, between), column)
        for j, place in enumerate(places):
            row = load(builder, pointer(builder, place, at), mask)
            _store_columns(builder, row, out, builder.add(to, integer(j * PANEL)), between)
        return []

    whole = builder.and_(dim, integer(-WIDTH))
    loop(builder, integer(0), whole, integer(WIDTH), [], step)
    with builder.if_then(builder.icmp_signed("<", whole, dim), likely=False):
        step(whole, [], vectors.below(builder, builder.sub(dim, whole)))


@inlined
def _softmax(scores: int, first: int, end: int, cap: float, before: float) -> tuple[float, float]:
    """Scores from ``first`` to ``end`` of a row to weights 2^(score - largest), 0 around them up to multiples of 16.

    Scores are logarithms to base 2, or with a cap what it is to be multiplied with. ``before``: the largest so far; the
    largest and the sum of the weights come back.
    """
    low, high = first // WIDTH * WIDTH, (end + WIDTH - 1) // WIDTH * WIDTH
    if cap > 0:
        _cap(scores + 4 * low, high - low, cap)
    _mask(scores + 4 * low, first - low)
    _mask(scores + 4 * (high - WIDTH), end - (high - WIDTH) - WIDTH)
    largest = max(before, _largest(scores + 4 * low, high - low))
    return largest, _weigh(scores + 4 * low, high - low, largest)


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
    cap, scaling = (softcap * _LOG2_E, scaling / softcap) if softcap > 0 else (0.0, scaling * _LOG2_E)
    _clear(scaled, 2 * heads * padded)
    for head in range(heads):
        _scale(query + 4 * head * dim, dim, scaling, scaled + 4 * head * padded)
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
                for member in range(head * group, (head + 1) * group):
                    place = scores + 4 * (member * _SCORES + at - low)
                    _dots(scaled + 4 * member * padded, there, dim, size - 1, ahead or there, place)
                there += head_size
                ahead += head_size if ahead else 0
            at += size
            inside += size
            if inside == block:
                nth, inside = nth + 1, 0
        for head in range(heads):
            before = largest[head]
            best, total = _softmax(scores + 4 * head * _SCORES, 0, high - low, cap, before)
            largest[head] = best
            if low > begin and best > before:
                scale = _power_of_two(before - best)
                total += totals[head] * scale
                _scale(sums + 4 * head * padded, padded, scale, sums + 4 * head * padded)
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
        _scale(sums + 4 * head * padded, dim, 1 / totals[head], out + 4 * head * dim)


@inlined
def _prompt(
    q: int,
    q_stride: int,
    count: int,
    context: int,
    table: int,
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
    """Queries of a row as rows of matrix products, those of one KV head together: token by token, then its heads.

    For each piece of queries, each piece of the keys that it sees is packed into panels; then strips of queries take
    their scores over them, weights and sums of values. What a later piece of keys makes larger is scaled.
    """
    blocks, head_size, block_size = int32s(table), 4 * block * dim, 4 * kv_heads * block * dim
    padded = (dim + WIDTH - 1) // WIDTH * WIDTH
    panels = (dim + _COLUMNS - 1) // _COLUMNS * _COLUMNS
    most = max(QUERY_ROWS // group, 1)
    addresses, scaled = scratch, scratch + 8 * WIDTH
    sums = scaled + 4 * most * group * padded
    scores = sums + 4 * most * group * panels
    packed_keys = scores + 4 * STRIP * _SCORES
    packed_values = packed_keys + 4 * PIECE * padded
    largest = floats(packed_values + 4 * PIECE * panels)
    totals = floats(packed_values + 4 * (PIECE * panels + most * group))
    cap, scaling = (softcap * _LOG2_E, scaling / softcap) if softcap > 0 else (0.0, scaling * _LOG2_E)
    for head in range(kv_heads):
        for start in range(0, count, most):
            tokens = min(most, count - start)
            rows = tokens * group
            for token in range(tokens):
                query = q + 4 * ((start + token) * q_stride + head * group * dim)
                for member in range(group):
                    _scale(query + 4 * member * dim, dim, scaling, scaled + 4 * (token * group + member) * padded)
            _clear(sums, rows * panels)
            for n in range(rows):
                largest[n], totals[n] = -math.inf, 0
            end = context + start + tokens
            begin = max(context + start + 1 - window, 0) if window > 0 else 0
            for low in range(begin, end, PIECE):
                high = min(low + PIECE, end)
                nth, inside = low // block, low % block
                place = head * head_size + blocks[nth] * block_size + 4 * inside * dim
                for at in range(0, high - low, WIDTH):
                    for j in range(WIDTH):
                        int64s(addresses)[j] = keys + place
                        if low + at + j + 1 < high:  # else the last one again
                            place, inside = place + 4 * dim, inside + 1
                            if inside == block:
                                nth, inside = nth + 1, 0
                                place = head * head_size + blocks[nth] * block_size
                    column = at // PANEL * PANEL
                    to = packed_keys + 4 * (column * padded + at - column)
                    _pack_keys(addresses, dim, padded * PANEL, to)
                    for j in range(WIDTH):
                        int64s(addresses)[j] += values - keys
                    _pack_values(addresses, dim, PIECE * PANEL, packed_values + 4 * at * PANEL)
                for strip in range(0, rows, STRIP):
                    size = min(STRIP, rows - strip)
                    seen = context + start + strip // group + 1  # by the first query of the strip, and by its last:
                    right = min(context + start + (strip + size - 1) // group + 1, high) - low
                    left = max(seen - window - low, 0) if window > 0 else 0
                    if right <= left:
                        continue
                    for column in range(left // PANEL * PANEL, right, PANEL):
                        to = scores + 4 * column
                        panel = packed_keys + 4 * column * padded
                        tile(scaled + 4 * strip * padded, padded, size, panel, dim, to, _SCORES, 0)
                    for n in range(size):
                        seen = context + start + (strip + n) // group + 1
                        first = max(seen - window - low, left) if window > 0 else 0
                        mine = scores + 4 * n * _SCORES
                        last = min(seen - low, right)
                        low_columns, high_columns = left // WIDTH * WIDTH, (right + WIDTH - 1) // WIDTH * WIDTH
                        if last <= first:
                            _clear(mine + 4 * low_columns, high_columns - low_columns)
                            continue
                        before = largest[strip + n]
                        best, total = _softmax(mine, first, last, cap, before)
                        last = (last + WIDTH - 1) // WIDTH * WIDTH
                        _clear(mine + 4 * low_columns, first // WIDTH * WIDTH - low_columns)
                        _clear(mine + 4 * last, high_columns - last)
                        largest[strip + n] = best
                        if totals[strip + n] > 0 and best > before:
                            scale = _power_of_two(before - best)
                            total += totals[strip + n] * scale
                            result = sums + 4 * (strip + n) * panels
                            _scale(result, panels, scale, result)
                        else:
                            total += totals[strip + n]
                        totals[strip + n] = total
                    for column in range(0, dim, PANEL):
                        panel = packed_values + 4 * (column * PIECE + left * PANEL)
                        to = sums + 4 * (strip * panels + column)
                        tile(scores + 4 * left, _SCORES, size, panel, right - left, to, panels, 1)
            for token in range(tokens):
                result = out + 4 * ((start + token) * out_stride + head * group * dim)
                for member in range(group):
                    n = token * group + member
                    _scale(sums + 4 * n * panels, dim, 1 / totals[n], result + 4 * member * dim)


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
    scratch = (scratch + 63) // 64 * 64  # a vector across two cache lines costs twice
    for row in range(num_rows):
        start, context = int64s(first)[row], int64s(computed)[row]
        table = tables + 4 * row * table_stride
        new = int64s(count)[row]
        if new >= FEW:
            _prompt(
                q + 4 * start * q_stride,
                q_stride,
                new,
                context,
                table,
                keys,
                values,
                block,
                kv_heads,
                group,
                dim,
                scaling,
                window,
                softcap,
                out + 4 * start * out_stride,
                out_stride,
                scratch,
            )
            continue
        coming, coming_count = 0, 0
        if row + 1 < num_rows:
            after = int64s(computed)[row + 1] + 1
            skipped = max(after - window, 0) // block if window > 0 else 0
            coming = table + 4 * (table_stride + skipped)
            coming_count = (after + block - 1) // block - skipped
        for i in range(new):
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
