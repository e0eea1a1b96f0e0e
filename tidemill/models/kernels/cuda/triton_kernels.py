"""Triton kernels of the engine, and those that engine and trainer share.

`launchers` wraps them; nothing else imports this module, because Triton may not be installed. Sums are float32, whatever
dtype numbers are kept in. Where PyTorch's own operations would round to the narrow dtype between two steps, so do these.
Sizes that end in WIDTH are powers of two, at least as large as what they hold.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

LOWEST = tl.constexpr(-1e30)  # where a running maximum begins: finite, so that LOWEST - LOWEST is 0


@triton.jit
def norm(x, x_row, weight, out, eps, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < SIZE
    value = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / SIZE + eps)
    normed = (value * scale).to(x.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + at, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate(
    heads, heads_row, query_weight, key_weight, eps, cos, sin, out, pages, writes,
    QUERIES: tl.constexpr, TURNED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    TOGETHER: tl.constexpr, NORMED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the queries and keys of one row; write them to `out`.

    With a PAGE, only the queries go there, and keys and values go to the row's place in the pages.
    """
    row = tl.program_id(0).to(tl.int64)
    narrow = out.dtype.element_ty
    head = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)[:, None]
    at = tl.arange(0, WIDTH)[None, :]
    inside = (at < HALF) & (head < HEADS)
    source = heads + row * heads_row + head * 2 * HALF + at
    given_a, given_b = tl.load(source, mask=inside, other=0.0), tl.load(source + HALF, mask=inside, other=0.0)
    a, b = given_a.to(tl.float32), given_b.to(tl.float32)
    if NORMED:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        here = tl.arange(0, WIDTH)
        real = here < HALF
        of_query = head < QUERIES
        first = (
            tl.where(
                of_query,
                tl.load(query_weight + here, mask=real, other=0.0)[None, :],
                tl.load(key_weight + here, mask=real, other=0.0)[None, :],
            )
            .to(narrow)
            .to(tl.float32)
        )
        second = (
            tl.where(
                of_query,
                tl.load(query_weight + HALF + here, mask=real, other=0.0)[None, :],
                tl.load(key_weight + HALF + here, mask=real, other=0.0)[None, :],
            )
            .to(narrow)
            .to(tl.float32)
        )
        a = ((a * scale).to(narrow).to(tl.float32) * first).to(narrow).to(tl.float32)
        b = ((b * scale).to(narrow).to(tl.float32) * second).to(narrow).to(tl.float32)
    turn = tl.arange(0, WIDTH)
    c = tl.load(cos + row * HALF + turn, mask=turn < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * HALF + turn, mask=turn < HALF, other=0.0).to(tl.float32)[None, :]
    first, second = (a * c - b * s).to(narrow), (b * c + a * s).to(narrow)
    if PAGE:
        target = tl.load(writes + row).to(tl.int64)
        keys, is_value, kept = TURNED - QUERIES, head >= TURNED, inside & (head >= QUERIES)
        place = ((target // PAGE) * keys + head - tl.where(is_value, TURNED, QUERIES)) * PAGE + target % PAGE
        into = pages + place * (4 * HALF) + tl.where(is_value, 2 * HALF, 0) + at
        tl.store(into, tl.where(is_value, given_a.to(narrow), first), mask=kept)
        tl.store(into + HALF, tl.where(is_value, given_b.to(narrow), second), mask=kept)
        inside &= head < QUERIES
    into = out + (row * (QUERIES if PAGE else TURNED) + head) * 2 * HALF + at
    tl.store(into, first, mask=inside)
    tl.store(into + HALF, second, mask=inside)


@triton.jit
def gate(gate_up, out, SIZE, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    narrow = out.dtype.element_ty
    a = tl.load(gate_up + row * 2 * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(gate_up + row * 2 * SIZE + SIZE + at, mask=inside, other=0.0).to(tl.float32)
    opened = (a / (1.0 + tl.exp(-a))).to(narrow).to(tl.float32)
    tl.store(out + row * SIZE + at, (opened * b).to(narrow), mask=inside)


@triton.jit
def softmax_of(score, visible, value, peak, total, seen, EXACT: tl.constexpr):
    """Update the softmax attention of rows [R] with one more tile of keys.

    score [R, T], value [T, E] -> (maximum [R], sum of exponentials [R], sum of values [R, E]). EXACT: compensate for the
    rounding of the weights.
    """
    score = tl.where(visible, score, LOWEST)
    higher = tl.maximum(peak, tl.max(score, 1))
    weight = tl.where(visible, tl.exp(score - higher[:, None]), 0.0)
    shrink = tl.exp(peak - higher)
    rounded = weight.to(value.dtype)
    seen = seen * shrink[:, None] + tl.dot(rounded, value, input_precision="ieee")
    if EXACT and value.dtype != tl.float32:
        seen += tl.dot((weight - rounded.to(tl.float32)).to(value.dtype), value)
    return higher, total * shrink + tl.sum(weight, 1), seen


@triton.jit
def attend(
    pages, q, q_row, out, sums, lengths, table, width, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_WIDTH: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Attention of one row's queries for one key/value head, or for one of SPLITS parts of the keys.

    With several parts, `out` and `sums` (maximum, sum of exponentials) hold parts that `merge` joins.
    """
    head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + row)
    columns = tl.load(width)
    low = 0
    if WINDOW:
        low = tl.maximum(length - WINDOW, 0)
    first = low // TILE * TILE
    each = tl.cdiv(tl.cdiv(length - first, TILE), SPLITS) * TILE
    begin = first + split * each
    end = tl.minimum(begin + each, length)
    element = tl.arange(0, SIZE)
    member = tl.arange(0, GROUP_WIDTH)
    real = member < GROUP
    query = tl.load(
        q + row * q_row + (head * GROUP + member)[:, None] * SIZE + element[None, :], mask=real[:, None], other=0.0
    )
    highest = tl.full([GROUP_WIDTH], LOWEST, tl.float32)
    total = tl.zeros([GROUP_WIDTH], tl.float32)
    seen = tl.zeros([GROUP_WIDTH, SIZE], tl.float32)
    at = begin + tl.arange(0, TILE)
    page = tl.load(table + row * columns + at // PAGE, mask=at < end, other=0)
    for start in range(begin, end, TILE):
        at = start + tl.arange(0, TILE)
        inside = (at < end) & (at >= low)
        base = ((page.to(tl.int64) * HEADS + head) * PAGE + at % PAGE) * (2 * SIZE)
        page = tl.load(
            table + row * columns + (at + TILE) // PAGE, mask=at + TILE < end, other=0
        )  # loaded early for the next tile
        key = tl.load(pages + base[None, :] + element[:, None], mask=inside[None, :], other=0.0)
        value = tl.load(pages + base[:, None] + SIZE + element[None, :], mask=inside[:, None], other=0.0)
        score = tl.dot(query, key, input_precision="ieee") * scale
        highest, total, seen = softmax_of(score, inside[None, :], value, highest, total, seen, True)
    if SPLITS == 1:
        into = out + (row * HEADS * GROUP + head * GROUP + member)[:, None] * SIZE + element[None, :]
        tl.store(into, (seen / tl.maximum(total, 1e-30)[:, None]).to(out.dtype.element_ty), mask=real[:, None])
    else:
        part = (row * HEADS * GROUP + head * GROUP + member) * SPLITS + split
        tl.store(out + part[:, None] * SIZE + element[None, :], seen, mask=real[:, None])
        tl.store(sums + part * 2, highest, mask=real)
        tl.store(sums + part * 2 + 1, total, mask=real)


@triton.jit
def attend_tile(
    pages, q, q_row, out, tiles, table, width, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Attention of one tile of a chunk's queries for one key/value head, up to the query itself."""
    tile, head = tiles + tl.program_id(0) * 4, tl.program_id(1)
    of, first, position, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    of = of.to(tl.int64) * tl.load(width)
    token, member = tl.arange(0, ROWS) // TOGETHER, tl.arange(0, ROWS) % TOGETHER
    there = (token < count) & (member < GROUP)
    at, which = (first + token).to(tl.int64), head * GROUP + member
    element = tl.arange(0, SIZE)
    query = tl.load(q + (at * q_row + which * SIZE)[:, None] + element[None, :], mask=there[:, None], other=0.0)
    where, end = position + token, position + count
    low = 0
    if WINDOW:
        low = tl.maximum(position - WINDOW + 1, 0) // KEYS * KEYS
    peak = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    seen = tl.zeros([ROWS, SIZE], tl.float32)
    for start in range(low, end, KEYS):
        j = start + tl.arange(0, KEYS)
        inside = j < end
        page = tl.load(table + of + j // PAGE, mask=inside, other=0).to(tl.int64)
        base = ((page * HEADS + head) * PAGE + j % PAGE) * (2 * SIZE)
        key = tl.load(pages + base[None, :] + element[:, None], mask=inside[None, :], other=0.0)
        value = tl.load(pages + base[:, None] + SIZE + element[None, :], mask=inside[:, None], other=0.0)
        visible = inside[None, :] & (j[None, :] <= where[:, None])
        if WINDOW:
            visible &= where[:, None] - j[None, :] < WINDOW
        score = tl.dot(query, key, input_precision="ieee") * scale
        peak, total, seen = softmax_of(score, visible, value, peak, total, seen, False)
    into = ((at * (HEADS * GROUP) + which) * SIZE)[:, None] + element[None, :]
    tl.store(out + into, (seen / total[:, None]).to(out.dtype.element_ty), mask=there[:, None])


@triton.jit
def merge(parts, sums, out, SPLITS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split, element = tl.arange(0, WIDTH), tl.arange(0, SIZE)
    real = split < SPLITS
    highest = tl.load(sums + (row * SPLITS + split) * 2, mask=real, other=LOWEST)
    total = tl.load(sums + (row * SPLITS + split) * 2 + 1, mask=real, other=0.0)
    weight = tl.where(real, tl.exp(highest - tl.max(highest)), 0.0)
    seen = tl.load(parts + ((row * SPLITS + split) * SIZE)[:, None] + element[None, :], mask=real[:, None], other=0.0)
    value = tl.sum(seen * weight[:, None], 0) / tl.maximum(tl.sum(total * weight), 1e-30)  # nothing: a row of length 0
    tl.store(out + row * SIZE + element, value.to(out.dtype.element_ty))


@triton.jit
def survey(logits, vocab, sharpness, found, likeliest, BLOCK: tl.constexpr):
    """Maximum and sum of exponentials of one block of a row's logits, and the index of the maximum.

    The first two are computed for the sharpened logits and for the logits as they are.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    plain = tl.load(logits + row * vocab + at, mask=inside, other=float("-inf"))
    sharp = tl.where(inside, plain * tl.load(sharpness + row).to(tl.float32), float("-inf"))
    top, peak = tl.max(plain), tl.max(sharp)
    into = found + (row * tl.num_programs(1) + block) * 4
    tl.store(into, peak)
    tl.store(into + 1, tl.sum(tl.where(sharp == float("-inf"), 0.0, tl.exp(sharp - peak))))
    tl.store(into + 2, top)
    tl.store(into + 3, tl.sum(tl.where(plain == float("-inf"), 0.0, tl.exp(plain - top))))
    tl.store(likeliest + row * tl.num_programs(1) + block, tl.min(tl.where(plain == top, at, vocab)))


@triton.jit
def draw(
    logits, vocab, sharpness, uniform, found, likeliest, out, into, rows, BLOCKS, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Draw the token of one row; write it, its logprob and the unmodified model's logprob.

    They are three float64, `rows` apart. The token is written to `into`, too.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, WIDTH)
    real = block < BLOCKS
    source = found + (row * BLOCKS + block) * 4
    peaks = tl.load(source, mask=real, other=float("-inf"))
    tops = tl.load(source + 2, mask=real, other=float("-inf"))
    peak, top = tl.max(peaks), tl.max(tops)
    masses = tl.where(real, tl.load(source + 1, mask=real, other=0.0) * tl.exp(peaks - peak), 0.0).to(tl.float64)
    plain = tl.sum(tl.where(real, tl.load(source + 3, mask=real, other=0.0) * tl.exp(tops - top), 0.0).to(tl.float64))
    total = tl.sum(masses)
    sharp = tl.load(sharpness + row).to(tl.float32)
    if sharp == 0.0:
        first = tl.min(tl.where(tops == top, block, WIDTH))
        token = tl.load(likeliest + row * BLOCKS + tl.minimum(first, BLOCKS - 1))
        logprob = (top - top).to(tl.float64)  # 0, and not a number where the logits are none
    else:
        target = tl.load(uniform + row) * total
        # Rounding can push the target to the end of the sum or past it: then the last block with any mass is taken.
        last = tl.max(tl.where(masses > 0, block, 0))
        before = tl.cumsum(masses)
        chosen = tl.minimum(tl.sum((real & (before <= target)).to(tl.int32)), last)
        rest = target - tl.sum(tl.where(block < chosen, masses, 0.0))
        at = chosen * BLOCK + tl.arange(0, BLOCK)
        inside = at < vocab
        near = tl.load(logits + row * vocab + at, mask=inside, other=float("-inf")) * sharp
        weights = tl.where(inside, tl.exp(near - peak), 0.0).to(tl.float64)
        last = tl.max(tl.where(weights > 0, tl.arange(0, BLOCK), 0))
        reached = tl.sum((inside & (tl.cumsum(weights) <= rest)).to(tl.int32))
        token = chosen * BLOCK + tl.minimum(reached, last)
        chosen_logit = tl.load(logits + row * vocab + token)
        logprob = (chosen_logit * sharp - peak).to(tl.float64) - tl.log(total)
    model = (tl.load(logits + row * vocab + tl.minimum(token, vocab - 1)) - top).to(tl.float64) - tl.log(plain)
    tl.store(into + row, tl.minimum(token, vocab - 1).to(tl.int32))
    tl.store(out + row, token.to(tl.float64))
    tl.store(out + rows + row, logprob)
    tl.store(out + 2 * rows + row, model)


@triton.jit
def feed(tokens, sampled, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    token = tl.load(tokens + at, mask=inside, other=0)
    fed = tl.load(sampled + (-1 - token), mask=inside & (token < 0), other=0)
    tl.store(out + at, tl.where(token < 0, fed, token), mask=inside)


@triton.jit
def summarise(logits, temperature, targets, totals, logprobs, entropies, vocab, BLOCK: tl.constexpr, ENTROPY: tl.constexpr):
    """Log of the sum of exponentials, target's logprob and entropy of a row, in one pass."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    # Each lane keeps its own peak, its sum of exponentials, and their sum weighted by the distance to the peak.
    peak = tl.full([BLOCK], LOWEST, tl.float32)
    total, weighted = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf")) / heat
        higher = tl.maximum(peak, value)
        part, shrink = tl.exp(value - higher), tl.exp(peak - higher)
        if ENTROPY:
            below = tl.where(value == float("-inf"), 0.0, part * (value - higher))
            weighted = shrink * (weighted + (peak - higher) * total) + below
        total = total * shrink + part
        peak = higher
    top = tl.max(peak)
    shrink = tl.exp(peak - top)
    whole = tl.sum(total * shrink)
    tl.store(totals + row, top + tl.log(whole))
    target = tl.load(logits + row * vocab + tl.load(targets + row)) / heat
    tl.store(logprobs + row, target - top - tl.log(whole))
    if ENTROPY:
        tl.store(entropies + row, tl.log(whole) - tl.sum(shrink * (weighted + (peak - top) * total)) / whole)


@triton.jit
def differentiate(
    logits, out, temperature, targets, totals, entropies, d_logprobs, d_entropies, vocab,
    BLOCK: tl.constexpr, LOGPROBS: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Gradient of the loss by a row's logits, in their own place or elsewhere."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    heat = tl.load(temperature + row)
    value = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf")) / heat
    logprob = value - tl.load(totals + row)
    there = value != float("-inf")
    factor = tl.zeros([BLOCK], tl.float32)
    own = 0.0
    if LOGPROBS:
        own = tl.load(d_logprobs + row)
        factor += own
    if ENTROPY:
        factor += tl.load(d_entropies + row) * tl.where(there, logprob + tl.load(entropies + row), 0.0)
    change = tl.where(there, -tl.exp(logprob) * factor, 0.0)
    if LOGPROBS:
        change += tl.where(at == tl.load(targets + row), own, 0.0)
    tl.store(out + row * vocab + at, (change / heat).to(out.dtype.element_ty), mask=at < vocab)


@triton.jit
def keyed_sums(
    elements, keys, factors, out, count, first, first_run,
    WIDTH: tl.constexpr, WORD: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """(sum of elements times keys, sum of words), one pair for each program's elements.

    Elements of WIDTH bytes are read as unsigned integers, words have WORD bytes. A program takes BLOCK * STEPS elements.
    """
    begin = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    total, words = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for step in range(0, STEPS):
        at = begin + step * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        index = first + at
        value = tl.load(elements + at, mask=inside, other=0).to(tl.int64) & ((1 << (8 * WIDTH)) - 1)
        key = tl.load(keys + index % RUN, mask=inside, other=0)
        total += value * (key * tl.load(factors + index // RUN - first_run, mask=inside, other=0))
        words += value << (at % (WORD // WIDTH) * (8 * WIDTH))
    tl.store(out + tl.program_id(0) * 2, tl.sum(total))
    tl.store(out + tl.program_id(0) * 2 + 1, tl.sum(words))
