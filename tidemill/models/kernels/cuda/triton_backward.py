"""Triton kernels of the trainer: backward passes, and attention inside packed sequences.

`launchers` wraps them; nothing else imports this module. The backward passes are those of attention, norms, rotations
and gates. Sums are float32, whatever dtype numbers are kept in. For sums over rows, the gradients of weights, each
program takes every n-th row, and the programs' sums are added in order. Sizes that end in WIDTH are powers of two, at
least as large as what they hold.

The backward pass of attention computes again what it needs: of a query, only the log of its sum of exponentials is kept.
A tile of queries consists of consecutive tokens and of all heads that read the same key/value head: row r is token r //
GROUP, head r % GROUP.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from tidemill.models.kernels.cuda.triton_kernels import LOWEST, softmax_of


@triton.jit
def norm_back(x, x_row, weight, eps, d, d_x, sums, rows, SIZE: tl.constexpr, WIDTH: tl.constexpr, AGAIN: tl.constexpr):
    at = tl.arange(0, WIDTH)
    inside = at < SIZE
    scaling = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    for each in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(each, tl.int64)
        value = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
        change = tl.load(d + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value) / SIZE + eps)
        normed = (value * scale).to(x.dtype.element_ty).to(tl.float32)
        total += change * normed
        inner = change * scaling
        back = scale * (inner - value * scale * (tl.sum(inner * value * scale) / SIZE))
        tl.store(d_x + row * SIZE + at, back.to(d_x.dtype.element_ty), mask=inside)
        if AGAIN:
            tl.store(d + row * SIZE + at, (normed * scaling).to(d.dtype.element_ty), mask=inside)
    tl.store(sums + tl.program_id(0) * SIZE + at, total, mask=inside)


@triton.jit
def gate_back(gate_up, d, out, SIZE, BLOCK: tl.constexpr, AGAIN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    narrow = out.dtype.element_ty
    a = tl.load(gate_up + row * 2 * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(gate_up + row * 2 * SIZE + SIZE + at, mask=inside, other=0.0).to(tl.float32)
    change = tl.load(d + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-a))
    opened = (a * share).to(narrow).to(tl.float32)
    tl.store(out + row * 2 * SIZE + at, (change * b * share * (1.0 + a * (1.0 - share))).to(narrow), mask=inside)
    tl.store(out + row * 2 * SIZE + SIZE + at, (change * opened).to(narrow), mask=inside)
    if AGAIN:
        tl.store(d + row * SIZE + at, (opened * b).to(narrow), mask=inside)


@triton.jit
def rotate_back(
    heads, heads_row, query_weight, key_weight, eps, cos, sin, d_q, d_q_row, d_k, d_k_row, d_v, d_v_row, out, sums, rows,
    QUERIES: tl.constexpr, TURNED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    TOGETHER: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    narrow = out.dtype.element_ty
    head = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)[:, None]
    at = tl.arange(0, WIDTH)
    real = at < HALF
    of_query, turned = head < QUERIES, head < TURNED
    of_key = turned & (head >= QUERIES)
    other = (head >= TURNED) & (head < HEADS)
    inside = real[None, :] & turned
    first = tl.zeros([1, 1], tl.float32) + 1.0
    second = first
    if NORMED:
        query_first = tl.load(query_weight + at, mask=real, other=0.0).to(narrow).to(tl.float32)[None, :]
        key_first = tl.load(key_weight + at, mask=real, other=0.0).to(narrow).to(tl.float32)[None, :]
        query_second = tl.load(query_weight + HALF + at, mask=real, other=0.0).to(narrow).to(tl.float32)[None, :]
        key_second = tl.load(key_weight + HALF + at, mask=real, other=0.0).to(narrow).to(tl.float32)[None, :]
        first = tl.where(of_query, query_first, key_first)
        second = tl.where(of_query, query_second, key_second)
    # Each head has its own sum until the end: in a sum over heads, threads would wait for one another in every row.
    for_first, for_second = tl.zeros([TOGETHER, WIDTH], tl.float32), tl.zeros([TOGETHER, WIDTH], tl.float32)
    for each in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(each, tl.int64)
        place = head * 2 * HALF + at[None, :]
        from_q = d_q + row * d_q_row + place
        from_k = d_k + row * d_k_row + (place - QUERIES * 2 * HALF)
        from_v = d_v + row * d_v_row + (place - TURNED * 2 * HALF)
        ours, theirs, passed = real[None, :] & of_query, real[None, :] & of_key, real[None, :] & other
        d_a = tl.load(from_q, mask=ours, other=0.0).to(tl.float32) + tl.load(from_k, mask=theirs, other=0.0).to(tl.float32)
        d_b = tl.load(from_q + HALF, mask=ours, other=0.0).to(tl.float32)
        d_b += tl.load(from_k + HALF, mask=theirs, other=0.0).to(tl.float32)
        c = tl.load(cos + row * HALF + at, mask=real, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + row * HALF + at, mask=real, other=0.0).to(tl.float32)[None, :]
        back, back_second = d_a * c + d_b * s, d_b * c - d_a * s
        if NORMED:
            source = heads + row * heads_row + place
            a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
            scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
            a, b = a * scale, b * scale
            for_first += back * a.to(narrow).to(tl.float32)
            for_second += back_second * b.to(narrow).to(tl.float32)
            back, back_second = back * first, back_second * second
            inner = ((tl.sum(back * a, 1) + tl.sum(back_second * b, 1)) / (2 * HALF))[:, None]
            back, back_second = scale * (back - a * inner), scale * (back_second - b * inner)
        back += tl.load(from_v, mask=passed, other=0.0).to(tl.float32)
        back_second += tl.load(from_v + HALF, mask=passed, other=0.0).to(tl.float32)
        into = out + row * HEADS * 2 * HALF + place
        everything = real[None, :] & (head < HEADS)
        tl.store(into, back.to(narrow), mask=everything)
        tl.store(into + HALF, back_second.to(narrow), mask=everything)
    if NORMED:
        of_program = sums + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 4 * HALF
        tl.store(of_program + at, tl.sum(tl.where(of_query, for_first, 0.0), 0), mask=real)
        tl.store(of_program + HALF + at, tl.sum(tl.where(of_query, for_second, 0.0), 0), mask=real)
        tl.store(of_program + 2 * HALF + at, tl.sum(tl.where(of_key, for_first, 0.0), 0), mask=real)
        tl.store(of_program + 3 * HALF + at, tl.sum(tl.where(of_key, for_second, 0.0), 0), mask=real)


@triton.jit
def see(
    q, q_row, k, k_row, v, v_row, out, totals, tiles, places, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Attention of one tile of queries for one key/value head, up to the query itself."""
    tile, head = tiles + tl.program_id(0) * 4, tl.program_id(1)
    begin, position, packed, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    token = tl.arange(0, ROWS) // GROUP
    which = head * GROUP + tl.arange(0, ROWS) % GROUP
    there = token < count
    element = tl.arange(0, SIZE)
    at = (packed + token).to(tl.int64)
    query = tl.load(q + (at * q_row + which * SIZE)[:, None] + element[None, :], mask=there[:, None], other=0.0)
    where, end = position + token, position + count
    low = 0
    if WINDOW:
        low = tl.maximum(position - WINDOW + 1, 0) // KEYS * KEYS
    peak = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    seen = tl.zeros([ROWS, SIZE], tl.float32)
    for first in range(low, end, KEYS):
        j = first + tl.arange(0, KEYS)
        inside = j < end
        place = tl.load(places + begin + j, mask=inside, other=0).to(tl.int64)
        key = tl.load(k + (place * k_row + head * SIZE)[:, None] + element[None, :], mask=inside[:, None], other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        visible = inside[None, :] & (j[None, :] <= where[:, None])
        if WINDOW:
            visible &= where[:, None] - j[None, :] < WINDOW
        value = tl.load(v + (place * v_row + head * SIZE)[:, None] + element[None, :], mask=inside[:, None], other=0.0)
        peak, total, seen = softmax_of(score, visible, value, peak, total, seen, False)
    into = at * (HEADS * GROUP) + which
    tl.store(
        out + (into * SIZE)[:, None] + element[None, :],
        (seen / total[:, None]).to(out.dtype.element_ty),
        mask=there[:, None],
    )
    tl.store(totals + into, peak + tl.log(total), mask=there)


@triton.jit
def see_back_queries(
    q, q_row, k, k_row, v, v_row, out, totals, d_out, d_q, means, tiles, places, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile of queries. `means`, for `see_back_keys`: the products of d_out and output."""
    tile, head = tiles + tl.program_id(0) * 4, tl.program_id(1)
    begin, position, packed, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    token = tl.arange(0, ROWS) // GROUP
    which = head * GROUP + tl.arange(0, ROWS) % GROUP
    there = token < count
    element = tl.arange(0, SIZE)
    at = (packed + token).to(tl.int64)
    query = tl.load(q + (at * q_row + which * SIZE)[:, None] + element[None, :], mask=there[:, None], other=0.0)
    own = at * (HEADS * GROUP) + which
    dense = (own * SIZE)[:, None] + element[None, :]
    change = tl.load(d_out + dense, mask=there[:, None], other=0.0)
    result = tl.load(out + dense, mask=there[:, None], other=0.0)
    mean = tl.sum(change.to(tl.float32) * result.to(tl.float32), 1)
    tl.store(means + own, mean, mask=there)
    total = tl.load(totals + own, mask=there, other=0.0)
    where, end = position + token, position + count
    low = 0
    if WINDOW:
        low = tl.maximum(position - WINDOW + 1, 0) // KEYS * KEYS
    back = tl.zeros([ROWS, SIZE], tl.float32)
    for first in range(low, end, KEYS):
        j = first + tl.arange(0, KEYS)
        inside = j < end
        place = tl.load(places + begin + j, mask=inside, other=0).to(tl.int64)
        key = tl.load(k + (place * k_row + head * SIZE)[:, None] + element[None, :], mask=inside[:, None], other=0.0)
        value = tl.load(v + (place * v_row + head * SIZE)[:, None] + element[None, :], mask=inside[:, None], other=0.0)
        visible = inside[None, :] & (j[None, :] <= where[:, None]) & there[:, None]
        if WINDOW:
            visible &= where[:, None] - j[None, :] < WINDOW
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        weight = tl.where(visible, tl.exp(tl.where(visible, score - total[:, None], 0.0)), 0.0)
        inner = weight * (tl.dot(change, tl.trans(value), input_precision="ieee") - mean[:, None])
        back += tl.dot(inner.to(key.dtype), key, input_precision="ieee")
    tl.store(d_q + dense, (back * scale).to(d_q.dtype.element_ty), mask=there[:, None])


@triton.jit
def see_back_keys(
    q, q_row, k, k_row, v, v_row, totals, d_out, means, d_k, d_v, tiles, shared, lengths, begins, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of a sequence's own keys and values, for one key/value head.

    They come from the queries of that sequence, and of later ones that share these keys.
    """
    tile, head = tiles + tl.program_id(0) * 5, tl.program_id(1)
    sequence, position, packed = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    count, until = tl.load(tile + 3), tl.load(tile + 4)
    element = tl.arange(0, SIZE)
    at = (packed + tl.arange(0, KEYS)).to(tl.int64)
    j = position + tl.arange(0, KEYS)
    inside = tl.arange(0, KEYS) < count
    key = tl.load(k + (at * k_row + head * SIZE)[:, None] + element[None, :], mask=inside[:, None], other=0.0)
    value = tl.load(v + (at * v_row + head * SIZE)[:, None] + element[None, :], mask=inside[:, None], other=0.0)
    d_key, d_value = tl.zeros([KEYS, SIZE], tl.float32), tl.zeros([KEYS, SIZE], tl.float32)
    known = position + count  # keys before this position are shared with the present sequence
    for reader in range(sequence, until):
        own = tl.load(shared + reader)
        known = tl.where(reader > sequence, tl.minimum(known, own), known)
        stop = tl.load(lengths + reader)
        if WINDOW:
            stop = tl.minimum(stop, position + count - 1 + WINDOW)
        begin = tl.load(begins + reader)
        for first in range(tl.maximum(own, position), stop, ROWS // GROUP):
            token = first + tl.arange(0, ROWS) // GROUP
            which = head * GROUP + tl.arange(0, ROWS) % GROUP
            there = (token < stop) & (tl.arange(0, ROWS) < ROWS // GROUP * GROUP)
            of = (begin + token - own).to(tl.int64)
            row = of * (HEADS * GROUP) + which
            query = tl.load(q + (of * q_row + which * SIZE)[:, None] + element[None, :], mask=there[:, None], other=0.0)
            change = tl.load(d_out + (row * SIZE)[:, None] + element[None, :], mask=there[:, None], other=0.0)
            total = tl.load(totals + row, mask=there, other=0.0)
            mean = tl.load(means + row, mask=there, other=0.0)
            visible = (j[:, None] <= token[None, :]) & (j[:, None] < known) & there[None, :]
            if WINDOW:
                visible &= token[None, :] - j[:, None] < WINDOW
            score = tl.dot(key, tl.trans(query), input_precision="ieee") * scale
            weight = tl.where(visible, tl.exp(tl.where(visible, score - total[None, :], 0.0)), 0.0)
            d_value += tl.dot(weight.to(change.dtype), change, input_precision="ieee")
            inner = weight * (tl.dot(value, tl.trans(change), input_precision="ieee") - mean[None, :])
            d_key += tl.dot(inner.to(query.dtype), query, input_precision="ieee")
    into = ((at * HEADS + head) * SIZE)[:, None] + element[None, :]
    tl.store(d_k + into, (d_key * scale).to(d_k.dtype.element_ty), mask=inside[:, None])
    tl.store(d_v + into, d_value.to(d_v.dtype.element_ty), mask=inside[:, None])
