"""Block manager and scheduler against models of what they promise, without torch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.core.policy_version import PolicyKey
from tidemill.engine.native.kv_blocks import NULL_PAGE, ROOT, BlockManager, PageKey
from tidemill.engine.native.scheduler import Scheduler
from tidemill.engine.native.step_plan import Plan, Sequence

PAGE = 4
SALTS = PolicyKey("a", 0, 4), PolicyKey("b", 0, 4), PolicyKey("a", 1, 4)  # one step of two policies and incarnations
texts = st.lists(st.integers(0, 1), min_size=1, max_size=24)  # two tokens only: prefixes repeat all the time
operations = st.lists(
    st.tuples(st.sampled_from(["new", "grow", "free", "retire"]), texts, st.integers(0, 2), st.integers(0, 100)), max_size=60
)


@pytest.mark.parametrize("collide", [False, True])
@given(operations)
@settings(max_examples=120)
def test_never_leaks_and_never_serves_other_tokens(collide, steps):
    original = PageKey.__hash__
    if collide:
        PageKey.__hash__ = lambda self: 7  # every key collides with every other
    try:
        _drive_blocks(steps)
    finally:
        PageKey.__hash__ = original


def _drive_blocks(steps):
    blocks = BlockManager(12, PAGE)
    held: list[list[int]] = []
    content: dict[int, tuple] = {}  # page -> (salt, the whole prefix up to its end), as its owner wrote it
    for kind, text, which, pick in steps:
        salt = SALTS[which]
        tokens = np.array(text, np.int32)
        if kind == "new":
            shared, chain = blocks.lookup(tokens, salt)
            for i, page in enumerate(shared):
                assert content[page] == (salt, tuple(text[: (i + 1) * PAGE])), "the KV of another prefix was served"
            needed = blocks.count(len(text)) - len(shared)
            if not blocks.can_allocate(needed, shared):
                continue
            pages = blocks.allocate(needed, shared)
            assert NULL_PAGE not in pages and pages[: len(shared)] == shared
            for i in range(len(shared), len(text) // PAGE):
                content[pages[i]] = (salt, tuple(text[: (i + 1) * PAGE]))
                chain = blocks.register(pages[i], tokens[i * PAGE : (i + 1) * PAGE], chain, salt)
            held.append(pages)
        elif kind == "grow" and held and blocks.can_allocate(1):
            retired = {page for salt in blocks._retired for page in blocks._by_salt[salt]}
            page = blocks.append(held[pick % len(held)])
            content.pop(page, None)
            assert not retired or page in retired, "another page went first"
            assert sum(page in pages for pages in held) == 1, "a page in use was given away"
        elif kind == "free" and held:
            blocks.free(held.pop(pick % len(held)))
        elif kind == "retire":
            blocks.retire({salt})
            assert blocks._retired.keys() == blocks._by_salt.keys() - {salt}
        blocks.check_integrity(held)
    for pages in held:
        blocks.free(pages)
    blocks.check_integrity([])
    assert blocks.available == blocks.usable


def test_eviction_takes_the_least_recently_used_leaf_first():
    blocks = BlockManager(4, 1)
    tokens = np.arange(3, dtype=np.int32)
    pages, chain = blocks.allocate(3), ROOT
    for i, page in enumerate(pages):
        chain = blocks.register(page, tokens[i : i + 1], chain, PolicyKey(step=0))
    blocks.free(pages)
    blocks.allocate(1)
    assert blocks.lookup(tokens, PolicyKey(step=0))[0] == pages[:2]
    for other in (PolicyKey(step=1), PolicyKey(incarnation=1), PolicyKey("other")):
        assert blocks.lookup(tokens, other)[0] == [], "another salt is another cache"


def test_what_is_retired_is_given_out_again_first():
    blocks, tokens = BlockManager(100, 1), np.arange(3, dtype=np.int32)
    touched: set[int] = set()
    for version in range(30):
        pages, chain = blocks.allocate(3), ROOT
        touched |= set(pages)
        for i, page in enumerate(pages):
            chain = blocks.register(page, tokens[i : i + 1], chain, PolicyKey(step=version))
        blocks.free(pages)
        blocks.retire({PolicyKey(step=version), PolicyKey(step=version - 1)})
        found = [len(blocks.lookup(tokens, PolicyKey(step=v))[0]) for v in (version, version - 1, version - 3)]
        assert found == [3, 3 * (version > 0), 0]
        blocks.check_integrity([])
    assert len(touched) <= 9, "pages that were never touched stay so"
    held, _ = blocks.allocate(1), blocks.retire(())
    assert blocks.available == blocks.usable - 1 and held[0] in touched


def test_a_version_is_retired_without_a_look_at_its_pages():
    """The pause of an update is a decode step and 5 ms at most: a look at each of 60,000 pages takes 10 ms and more."""
    blocks = BlockManager(60_001, 1)
    for version in range(3):
        pages, chain = blocks.allocate(20_000), ROOT
        for page in pages:
            chain = blocks.register(page, np.array([page], np.int32), chain, PolicyKey(step=version))
        blocks.free(pages)
    for version in range(1, 4):
        blocks.retire({PolicyKey(step=v) for v in range(version, 3)})
        assert list(blocks._retired) == [PolicyKey(step=v) for v in range(version)]
        assert len(blocks._by_key) == 60_000, "they can be found until they are given out"
    retired = blocks.allocate(60_000)
    assert retired[:20_000] == list(range(20_000, 0, -1)), "leaves of the version that was retired first"


@pytest.mark.parametrize("damage", ["leak", "double", "lost", "salt", "retired"])
def test_integrity_check_sees_damage(damage):
    blocks = BlockManager(6, 2)
    pages = blocks.allocate(2)
    if damage in ("salt", "retired"):
        cached = blocks.allocate(1)
        blocks.register(cached[0], np.zeros(2, np.int32), ROOT, PolicyKey(step=0))
        blocks.free(cached)
        blocks.check_integrity([pages])
    if damage == "leak":
        held = []
    elif damage == "double":
        held = [pages, pages]
    elif damage == "lost":
        held = [pages]
        blocks._free.pop()
    else:
        held = [pages]
        if damage == "salt":
            blocks._by_salt[PolicyKey(step=1)] = blocks._by_salt.pop(PolicyKey(step=0))
        else:
            blocks._retired[PolicyKey(step=1)] = None
    with pytest.raises(RuntimeError, match="KV page"):
        blocks.check_integrity(held)


requests = st.lists(
    st.tuples(
        texts,
        st.integers(1, 20),
        st.booleans(),
        st.integers(0, 30),
        st.sampled_from(["", "abort", "drain", "renew", "stop"]),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=14,
)


@pytest.mark.parametrize("ahead", [False, True])
@given(requests, st.integers(1, 3), st.integers(1, 9), st.integers(6, 14), st.integers(1, 5), st.booleans())
@settings(max_examples=200)
def test_scheduler_computes_every_token_once_and_ends(ahead, wanted, policies, chunk, pages, slots, prefix_cache):
    """ahead: the next step is planned before what this one samples is known, but for what must know it."""
    blocks = BlockManager(pages + 1, PAGE, prefix_cache)
    scheduler = Scheduler(blocks, slots, 24, chunk, [PolicyKey(str(number)) for number in range(policies)])
    memory: dict[int, tuple] = {}  # what lies at each write position: the prefix it was computed from
    pending, ended = [], 0
    for text, extra, probe, when, event, policy in wanted:
        probe, limit = probe and len(text) > 1, len(text) + (0 if probe and len(text) > 1 else extra)
        sequence = Sequence(np.array(text, np.int32), limit, policy % policies, probe=probe)
        if len(text) > scheduler.context - (not probe):
            with pytest.raises(ValueError, match="context"):
                scheduler.submit(sequence)
        else:
            scheduler.submit(sequence)
            pending.append((sequence, when, event))
    under_way: list[tuple[Plan, np.ndarray]] = []
    order = {entry[0]: number for number, entry in enumerate(pending)}

    def end(entry):
        nonlocal ended
        scheduler.release(entry[0])
        pending.remove(entry)
        ended += 1

    def learn():
        plan, sampled = under_way.pop(0)
        for i in scheduler.learn(plan, sampled).tolist():
            slot, length = plan.sample_slots[i], plan.sample_positions[i] + 1
            assert scheduler.tokens[slot, length - 1] == sampled[i]
            [entry] = [e for e in pending if e[0].slot == slot]
            stops = entry[2] == "stop" and length > len(entry[0].prompt) + entry[1] // 4
            if length >= entry[0].limit or stops:
                end(entry)

    for step in range(3000):
        for entry in [e for e in pending if e[1] == step and e[2]]:
            if entry[2] == "abort":
                end(entry)
                scheduler.release(entry[0])  # twice is once
            elif entry[2] == "renew":
                while under_way:
                    learn()
                scheduler.salts[entry[0].policy] = PolicyKey(str(entry[0].policy), step=step)
                scheduler.begin_again(entry[0].policy)
        drains = {e[0].policy for e in pending if e[2] == "drain" and e[1] <= step < e[1] + 5}
        scheduler.draining = frozenset(drains)
        scheduler.check_integrity()
        if under_way and scheduler.may_preempt():
            learn()
        before = scheduler.preemptions
        plan = scheduler.plan()
        assert not under_way or scheduler.preemptions == before
        if plan is None:
            if under_way:
                learn()
                continue
            assert not scheduler.running
            if not pending:
                break
            assert scheduler.draining
            continue
        assert not any(sequence.policy in drains for sequence in plan.admitted)
        held = [s for s in scheduler.waiting if not s.released and s.slot < 0]
        assert held == sorted(held, key=lambda s: order[s]), "the queue keeps its order"
        tokens = scheduler.tokens.copy()  # as the device will read them
        for earlier, sampled in under_way:
            places = earlier.sample_slots, earlier.sample_positions
            same = scheduler._tenure[earlier.sample_slots] == earlier.tenures
            assert (tokens[places][same] == -1 - np.flatnonzero(same)).all()
            tokens[places] = np.where(same, sampled, tokens[places])
        assert all((tokens[slot, : scheduler.length[slot]] >= 0).all() for slot in scheduler.running)
        _check_plan(scheduler, tokens, plan, memory, chunk)
        scheduler.advance(plan)
        under_way.append((plan, np.full(len(plan.sample_slots), step % 2, np.int64)))
        while len(under_way) > (ahead and not plan.probes):
            learn()
        for entry in list(pending):
            sequence = entry[0]
            scored = scheduler.computed[sequence.slot] == scheduler.length[sequence.slot]
            if sequence.probe and not sequence.waiting and scored:
                end(entry)
    assert not pending, "a request starved"
    scheduler.check_integrity()
    assert blocks.available == blocks.usable and scheduler.waiting_count == 0 and scheduler.in_flight == 0
    assert scheduler.begun(range(policies)) == 0


def _check_plan(scheduler, tokens, plan, memory, chunk):
    """Writes land in own pages, every needed key is where the table says, and it was computed from the same prefix."""
    size = scheduler.blocks.page_size
    assert sum(c.count for c in plan.chunks) <= chunk
    assert len(set(plan.sample_slots.tolist())) == len(plan.sample_slots)
    rows = [(int(s), int(n) - 1) for s, n in zip(plan.singles, plan.lengths, strict=True)]
    rows += [(c.slot, c.start + i) for c in plan.chunks for i in range(c.count)]
    assert len(rows) == len(plan.tokens)
    assert plan.policies.tolist() == [scheduler.running[slot].policy for slot, _ in rows]
    written = plan.writes[plan.writes >= size]
    assert len(np.unique(written)) == len(written), "two rows write the same place"
    decoding = written[np.isin(written, plan.writes[: len(plan.singles)])]
    salts = {slot: scheduler.running[slot].salt for slot, _ in rows}
    for (slot, position), token, at, where in zip(rows, plan.tokens, plan.positions, plan.writes, strict=True):
        prefix = tuple(tokens[slot, : position + 1].tolist())
        assert at == position and token == scheduler.tokens[slot, position]
        if where >= size:  # not the null page
            holders = [s for s, seq in scheduler.running.items() if where // size in seq.pages]
            assert slot in holders
            memory[int(where)] = (salts[slot], prefix)
    for slot, position in rows:
        for i in range(position + 1):
            where = int(scheduler.table[slot, i // size]) * size + i % size
            salt, prefix = memory[where]
            assert prefix == tuple(tokens[slot, : i + 1].tolist()) and salt == salts[slot]
            assert i == position or where not in decoding, "somebody waits for a row that decodes"
    for row, slot in zip(plan.sample_rows, plan.sample_slots, strict=True):
        computing, position = rows[row]
        assert scheduler.running[slot].salt == salts[computing] and scheduler.length[slot] == position + 1
        assert (tokens[slot, : position + 1] == tokens[computing, : position + 1]).all()
    for source, target in plan.copies.tolist():
        holders = [s for s, seq in scheduler.running.items() if target in seq.pages]
        assert holders[1:] == [] and holders[0] in plan.sample_slots and not (plan.writes // size == target).any()
        memory.update({target * size + i: memory.get(source * size + i) for i in range(size)})


def test_thousands_of_waiting_requests_cost_nothing():
    scheduler = Scheduler(BlockManager(100, PAGE), 2, 64, 8)
    sequences = [Sequence(np.zeros(5, np.int32), limit=50) for _ in range(5000)]
    for sequence in sequences:
        scheduler.submit(sequence)
    for sequence in sequences[2:-1]:
        scheduler.release(sequence)
    assert scheduler.waiting_count == 3
    scheduler.plan()
    assert len(scheduler.running) == 2 and scheduler.waiting_count == 1
    scheduler.release(sequences[0])
    scheduler.plan()
    assert sequences[-1].slot >= 0


@pytest.mark.parametrize("length", [2 * PAGE, 2 * PAGE + 1])
@pytest.mark.parametrize("chunk", [100, 2 * PAGE + 1, 3])
def test_twins_that_arrive_together_are_computed_once(length, chunk):
    scheduler = Scheduler(BlockManager(20, PAGE), 4, 64, chunk)
    twins = [Sequence(np.arange(length, dtype=np.int32), limit=20) for _ in range(3)]
    for sequence in twins:
        scheduler.submit(sequence)
    plan, computed = scheduler.plan(), 0
    while not len(plan.sample_slots):
        scheduler.advance(plan)
        computed += len(plan.tokens)
        plan = scheduler.plan()
    assert computed + len(plan.tokens) == length and [s.cached for s in twins] == [0, length, length]
    assert (plan.writes >= PAGE).all() and plan.sample_rows.tolist() == [len(plan.tokens) - 1] * 3
    assert len(plan.copies) == (0 if length % PAGE == 0 else 2)
    scheduler.advance(plan)
    assert scheduler.learn(plan, np.array([1, 2, 3])).tolist() == [0, 1, 2]
    assert [scheduler.tokens[s.slot, length] for s in twins] == [1, 2, 3]
    plan = scheduler.plan()
    assert len(set(plan.writes.tolist())) == 3 and (plan.writes >= PAGE).all() and not len(plan.copies)


def test_only_what_is_of_one_version_and_cached_has_twins():
    tokens = np.arange(2 * PAGE + 1, dtype=np.int32)
    for prefix_cache, salt, probe in [(False, None, False), (True, PolicyKey(step=7), False), (True, None, True)]:
        scheduler = Scheduler(BlockManager(20, PAGE, prefix_cache), 4, 64, 100)
        given = [Sequence(tokens, limit=20), Sequence(tokens, limit=20, salt=salt, probe=probe)]
        for sequence in given:
            scheduler.submit(sequence)
        plan = scheduler.plan()
        assert given[1].cached == 0 and len(plan.tokens) == 2 * len(tokens) - probe and not len(plan.copies)


def test_an_unfinished_prompt_has_no_twin():
    scheduler = Scheduler(BlockManager(20, PAGE), 4, 64, 5)
    longer, shorter = (Sequence(np.arange(n, dtype=np.int32), limit=20) for n in (16, 5))
    scheduler.submit(longer)
    scheduler.submit(shorter)
    plan = scheduler.plan()
    assert [c.slot for c in plan.chunks] == [longer.slot] and shorter.waiting and not len(plan.sample_slots)


def test_pages_of_an_unfinished_prompt_are_not_found():
    scheduler = Scheduler(BlockManager(20, PAGE), 4, 64, 5)
    first, twin = (Sequence(np.arange(16, dtype=np.int32), limit=20) for _ in range(2))
    scheduler.submit(first)
    scheduler.advance(scheduler.plan())
    scheduler.release(first)
    scheduler.submit(twin)
    scheduler.plan()
    assert twin.cached == PAGE  # five tokens were computed: one full page


def test_who_came_last_gives_way_when_pages_run_out():
    """Then whoever came first always gets on, and so does everybody in the end."""
    scheduler = Scheduler(BlockManager(6, PAGE, False), 2, 24, 8)
    first, last = (Sequence(np.array([0, 1, 0], np.int32), limit=20) for _ in range(2))

    def step():
        plan = scheduler.plan()
        assert plan is not None
        scheduler.advance(plan)
        scheduler.learn(plan, np.zeros(len(plan.sample_slots), np.int64))

    scheduler.submit(first)
    step()
    scheduler.submit(last)
    while not scheduler.preemptions:
        step()
    assert last.waiting and list(scheduler.running.values()) == [first]


def test_pages_of_others_are_not_written_to():
    """The last token of a prompt that is cached whole is computed again: its KV stands in a page that others read."""
    scheduler = Scheduler(BlockManager(20, PAGE), 2, 64, 100)
    prompt = np.arange(2 * PAGE, dtype=np.int32)
    first, later = Sequence(prompt, limit=20), Sequence(prompt, limit=20)
    for sequence in (first, later):
        scheduler.submit(sequence)
        plan = scheduler.plan()
        scheduler.advance(plan)
        scheduler.learn(plan, np.zeros(len(plan.sample_slots), np.int64))
    page = int(scheduler.table[first.slot, 1])
    assert page == scheduler.table[later.slot, 1] and later.cached == 2 * PAGE - 1
    assert page not in (plan.writes // PAGE).tolist() and (plan.writes < PAGE).sum() == 1
