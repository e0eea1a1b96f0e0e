"""Scheduler: decides which tokens the next step computes. Integers only.

    submit -> waiting -> (admit: slot + pages) -> running -> release        preempt: running -> front of waiting

A running sequence owns a slot: a row of `tokens`, `length` (known tokens), `computed` (tokens whose KV is in the cache) and
`table` (its pages). A step computes the one pending token of every decoding row and up to `prefill_chunk` prompt tokens.
When pages run out the latest admitted sequence is preempted: its pages go, its tokens stay, and it is prefilled again.
Pages that chunks of a step are about to fill are findable at once: each layer writes before it reads, so prompts that
arrive together share a beginning within the very step that computes it. Where all rows decode, none waits for another.
A twin has the same tokens as a sequence that this very step computes to its end. It computes nothing: it samples from the
same row, and gets a copy of the page that is not full.
Sequences of several policies, which are numbers here, stand side by side in a step. Their salts differ, so none finds KV of
another policy, or is a twin of another policy's sequence.

    plan -> advance (it is being computed) -> learn (its sampled tokens)

The next step may be planned before this one's tokens are known: such a token is recorded as -1 - its place among the step's
samples. Code that reads tokens themselves, such as preemption, waits for `learn`.

A draft's tokens are rows like those that decode, behind their sequence's own row. They stand beyond its `length`, and count
only from `learn` on, as far as they are what was sampled: nothing else, such as the prefix cache, ever sees them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np

from tidemill.core.policy_version import PolicyKey
from tidemill.engine.native.drafts import accepted
from tidemill.engine.native.kv_blocks import NULL_PAGE, ROOT, BlockManager
from tidemill.engine.native.step_plan import Chunk, Plan, Sequence


class Scheduler:
    """Admits, grows, preempts and releases sequences, and plans steps."""

    def __init__(
        self,
        blocks: BlockManager,
        max_sequences: int,
        context: int,
        prefill_chunk: int,
        salts: Iterable[PolicyKey] = (PolicyKey(),),
    ) -> None:
        """salts: of each policy, by its number."""
        self.blocks, self.prefill_chunk = blocks, prefill_chunk
        self.context = min(context, blocks.usable * blocks.page_size)  # a lone sequence can always grow to its end
        self.salts = [*salts]  # of the sequences of each policy that are admitted from now on
        self.draining = frozenset[int]()  # policies of which no new sequence is admitted
        self._begun = [0] * len(self.salts)  # sequences of each policy that have a slot
        self.preemptions = 0
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}  # by slot, in order of admission
        # Zeroed lazily by the system: only rows and columns that are used take memory.
        self.tokens = np.zeros((max_sequences, self.context), np.int32)
        self.table = np.zeros((max_sequences, blocks.count(self.context)), np.int32)
        self.length = np.zeros(max_sequences, np.int64)
        self.computed = np.zeros(max_sequences, np.int64)
        self._owned = np.zeros(max_sequences, np.int64)  # pages in `table`
        self._shared = np.zeros(max_sequences, np.int64)  # leading tokens in shared pages, never written
        self._limit = np.zeros(max_sequences, np.int64)  # tokens each may hold
        self._tenure = np.zeros(max_sequences, np.int64)  # number of sequences that have left the slot
        self._probe = np.zeros(max_sequences, bool)
        self._policy = np.zeros(max_sequences, np.int64)
        self._free_slots = list(range(max_sequences - 1, -1, -1))
        self._released_waiting = 0  # released entries of `waiting`, which will be skipped
        self._order: np.ndarray | None = None  # `running` as an array
        # Of the step that is being planned:
        self._admitted: list[Sequence] = []  # for the first time
        self._ending: dict[tuple[PolicyKey, bytes], Sequence] = {}  # sequences computed to their last token, by their tokens
        self._twins: list[tuple[Sequence, Sequence]] = []  # (twin, the sequence that computes for it)

    @property
    def waiting_count(self) -> int:
        return len(self.waiting) - self._released_waiting

    @property
    def in_flight(self) -> int:
        """Sequences that have begun: running, or preempted."""
        return len(self.length) - len(self._free_slots)

    def begun(self, policies: Iterable[int]) -> int:
        """`in_flight` of some policies."""
        return sum(self._begun[policy] for policy in policies)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises ValueError if it can never fit."""
        size = len(sequence.prompt)
        if size == 0:
            raise ValueError("the prompt is empty: give at least one token")
        room = self.context if sequence.probe else self.context - 1
        if size > room:
            what = "tokens to score" if sequence.probe else "a prompt of"
            raise ValueError(
                f"{what} {size} tokens: this engine's context of {self.context} leaves room for {room}; "
                "shorten it, or raise engine.context or engine.kv_memory_mb"
            )
        sequence.limit = min(sequence.limit, self.context)
        self.waiting.append(sequence)

    def may_preempt(self) -> bool:
        """True if the next `plan` may preempt. All sampled tokens must be known by then."""
        return not self.blocks.can_allocate(len(self._growing()))

    def plan(self, drafts: Mapping[int, np.ndarray] | None = None) -> Plan | None:
        """The next step, or None when there is nothing to compute.

        drafts: by slot; they are computed in a step of nothing else but rows that decode.
        """
        self._admitted, self._ending, self._twins = [], {}, []
        self._grow()
        chunks: list[Chunk] = []
        budget = self._continue_prefill(chunks)
        self._admit(chunks, budget)
        slots = self._slots()
        length = self.length[slots]
        single = (length - self.computed[slots] == 1) & (length < self._limit[slots])
        if chunks:
            single &= ~np.isin(slots, [c.slot for c in chunks])
        singles = slots[single]
        if not len(singles) and not chunks:
            return None
        lengths = self.computed[singles] + 1
        order = np.argsort(-lengths, kind="stable")  # neighbours of similar length need least padding
        singles, lengths = singles[order], lengths[order]
        if drafts and not (chunks or self._twins):
            singles, lengths = self._with_drafts(singles, lengths, drafts)
        return self._lay_out(singles, lengths, chunks)

    def advance(self, plan: Plan) -> None:
        """Note that the plan is being computed."""
        self.computed[plan.singles] += 1
        for chunk in plan.chunks:
            self.computed[chunk.slot] += chunk.count
        self.tokens[plan.sample_slots, plan.sample_positions] = -1 - np.arange(len(plan.sample_slots))
        self.length[plan.sample_slots] += 1

    def learn(self, plan: Plan, sampled: np.ndarray) -> np.ndarray:
        """Store the tokens `sampled` [S] for the plan's `sample_slots`.

        Returns the indices that count. The other sequences were released since the step was planned, or the guess of the
        draft was another token: what was computed for it is overwritten when its place is computed again.
        """
        here = np.flatnonzero(self._tenure[plan.sample_slots] == plan.tenures)
        if (plan.drafted >= 0).any():
            here = here[accepted(plan.drafted[here], plan.sample_slots[here], plan.sample_positions[here], sampled[here])]
            more = plan.sample_slots[here[plan.drafted[here] >= 0]]
            np.add.at(self.length, more, 1)
            np.add.at(self.computed, more, 1)
        self.tokens[plan.sample_slots[here], plan.sample_positions[here]] = sampled[here]
        return here

    def release(self, sequence: Sequence) -> None:
        """Free the slot and the pages of a sequence that is over, wherever it stands."""
        if sequence.released:
            return
        sequence.released = True
        if sequence.waiting:
            self._released_waiting += 1  # skipped at its turn, without a search through the queue
        else:
            self._leave(sequence, len(sequence.prompt) if sequence.last else None)
        if sequence.slot >= 0:
            self._tenure[sequence.slot] += 1
            self._begun[sequence.policy] -= 1
            self._free_slots.append(sequence.slot)

    def preempt(self, sequence: Sequence) -> None:
        """Drop a sequence's KV and put it first in line."""
        self._leave(sequence)
        sequence.waiting = True
        self.waiting.appendleft(sequence)

    def preempt_all(self) -> None:
        """Preempt everything."""
        for sequence in reversed(list(self.running.values())):
            self.preempt(sequence)

    def begin_again(self, policy: int) -> None:
        """Preempt the sequences of a policy, and prefill those in flight under its present salt, not their own."""
        for sequence in reversed([each for each in self.running.values() if each.policy == policy]):
            self.preempt(sequence)
        for sequence in self.waiting:
            if sequence.slot < 0 and not sequence.released:
                break  # sequences that have begun come first
            if sequence.policy == policy:
                sequence.salt = None

    def check_integrity(self) -> None:
        self.blocks.check_integrity(s.pages for s in self.running.values())

    def _slots(self) -> np.ndarray:
        if self._order is None:
            self._order = np.fromiter(self.running, np.int64, len(self.running))
        return self._order

    def _growing(self) -> np.ndarray:
        """Slots whose next token begins a page."""
        slots = self._slots()
        begins = self.computed[slots] >= self._owned[slots] * self.blocks.page_size
        return slots[begins & (self.length[slots] < self._limit[slots])]

    def _grow(self) -> None:
        """Allocate a page for every row whose next token begins one; preempt if there are none."""
        for slot in self._growing().tolist():
            while slot in self.running and not self.blocks.can_allocate(1):
                self.preemptions += 1
                self.preempt(next(reversed(self.running.values())))
            if slot in self.running:
                self._append_page(slot)

    def _continue_prefill(self, chunks: list[Chunk]) -> int:
        budget = self.prefill_chunk
        slots = self._slots()
        for slot in slots[self.length[slots] - self.computed[slots] > 1].tolist():
            if budget == 0:
                break
            budget -= self._compute(self.running[slot], budget, chunks)
        return budget

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        aside = list[Sequence]()  # new ones of policies that drain: the others need not wait for them
        while self.waiting:
            sequence = self.waiting[0]
            if sequence.released:
                self.waiting.popleft()
                self._released_waiting -= 1
                continue
            begun = sequence.slot >= 0
            if not begun and (len(self.draining) == len(self.salts) or not self._free_slots):
                break
            if not begun and sequence.policy in self.draining:
                aside.append(self.waiting.popleft())
                continue
            # A probe's last token is only predicted, never computed.
            tokens = self.tokens[sequence.slot, : self.length[sequence.slot]] if begun else sequence.prompt
            tokens = tokens[:-1] if sequence.probe and not begun else tokens
            salt = sequence.salt or self.salts[sequence.policy]
            twin = None if sequence.probe else self._ending.get((salt, tokens.tobytes()))
            if budget == 0 and twin is None:
                break
            shared, chain = ([], ROOT) if sequence.probe else self.blocks.lookup(tokens, salt)
            needed = self.blocks.count(len(tokens)) - len(shared)
            if not self.blocks.can_allocate(needed, shared):
                break
            self.waiting.popleft()
            # At least one token is computed, so that there is a distribution to sample from; its KV is not written again.
            cached = len(tokens) if twin else min(len(shared) * self.blocks.page_size, len(tokens) - 1)
            self._enter(sequence, tokens, cached, self.blocks.allocate(needed, shared), len(shared), chain)
            if twin:
                self._twins.append((sequence, twin))
            else:
                budget -= self._compute(sequence, budget, chunks)
        self.waiting.extendleft(reversed(aside))

    def _enter(self, sequence: Sequence, tokens: np.ndarray, cached: int, pages: list[int], shared: int, chain: int) -> None:
        """Put a sequence into its slot.

        cached: tokens that need not be computed. shared: leading pages that other sequences also hold.
        """
        if sequence.slot < 0:
            sequence.slot = slot = self._free_slots.pop()
            sequence.cached = cached
            self._admitted.append(sequence)
            self.tokens[slot, : len(sequence.prompt)] = sequence.prompt
            self.length[slot] = len(tokens)
            self._limit[slot], self._probe[slot] = sequence.limit, sequence.probe
            self._policy[slot] = sequence.policy
            self._begun[sequence.policy] += 1
        slot = sequence.slot
        sequence.salt = sequence.salt or self.salts[sequence.policy]
        sequence.waiting = False
        sequence.pages, sequence.registered, sequence.chain = pages, shared, chain
        self.computed[slot] = cached
        self.table[slot, : len(sequence.pages)] = sequence.pages
        self._owned[slot] = len(sequence.pages)
        self._shared[slot] = shared * self.blocks.page_size
        self.running[slot] = sequence
        self._order = None

    def _leave(self, sequence: Sequence, kept: int | None = None) -> None:
        """Free a sequence's pages. Those of its first `kept` tokens, by default all, stay findable."""
        slot = sequence.slot
        computed = int(self.computed[slot])
        self._register(sequence, computed if kept is None else min(kept, computed))
        self.blocks.free(sequence.pages)
        self.table[slot, : len(sequence.pages)] = NULL_PAGE
        self._owned[slot] = 0
        sequence.pages = []
        del self.running[slot]
        self._order = None

    def _compute(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Plan the next pending tokens of a sequence; returns how many.

        A single one is left to the decoding rows.
        """
        start = int(self.computed[sequence.slot])
        pending = int(self.length[sequence.slot]) - start
        count = min(budget, pending)
        if pending > 1:
            chunks.append(Chunk(sequence.slot, start, count, 0))
            self._register(sequence, start + count)
        if count == pending and self.blocks.prefix_cache and not sequence.probe and sequence.salt is not None:
            self._ending[sequence.salt, self.tokens[sequence.slot, : start + count].tobytes()] = sequence
        return count

    def _with_drafts(
        self, singles: np.ndarray, lengths: np.ndarray, drafts: Mapping[int, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The rows with another one for each token of a draft that has room."""
        counts = np.array([1 + (self._draft(slot, drafts[slot]) if slot in drafts else 0) for slot in singles.tolist()])
        behind = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(singles, counts), np.repeat(lengths, counts) + behind

    def _draft(self, slot: int, draft: np.ndarray) -> int:
        """Write a draft behind a sequence's known tokens; returns how much of it has room.

        Pages are taken for it as long as one is left for each running sequence.
        """
        begin, size = int(self.length[slot]), self.blocks.page_size
        while self._owned[slot] * size < begin + len(draft) and self.blocks.can_allocate(1 + len(self.running)):
            self._append_page(slot)
        count = min(len(draft), int(self._owned[slot]) * size - begin)
        self.tokens[slot, begin : begin + count] = draft[:count]
        return count

    def _append_page(self, slot: int) -> None:
        self.table[slot, self._owned[slot]] = self.blocks.append(self.running[slot].pages)
        self._owned[slot] += 1

    def _register(self, sequence: Sequence, computed: int) -> None:
        if sequence.probe or not self.blocks.prefix_cache or sequence.salt is None:
            return
        size = self.blocks.page_size
        for index in range(sequence.registered, computed // size):
            tokens = self.tokens[sequence.slot, index * size : (index + 1) * size]
            sequence.chain = self.blocks.register(sequence.pages[index], tokens, sequence.chain, sequence.salt)
            sequence.registered = index + 1

    def _lay_out(self, singles: np.ndarray, lengths: np.ndarray, chunks: list[Chunk]) -> Plan:
        size = self.blocks.page_size
        slots, positions = [singles], [lengths - 1]
        row = len(singles)
        for chunk in chunks:
            chunk.row, row = row, row + chunk.count
            slots.append(np.full(chunk.count, chunk.slot))
            positions.append(np.arange(chunk.start, chunk.start + chunk.count))
        slot, position = np.concatenate(slots), np.concatenate(positions)
        tokens = self.tokens[slot, position].astype(np.int64)
        page, offset = np.divmod(position, size)
        pages = np.where(position < self._shared[slot], NULL_PAGE, self.table[slot, page])
        probing = self._probe[singles]
        probes = [c for c in chunks if self._probe[c.slot]]
        probes += [Chunk(int(singles[i]), int(lengths[i]) - 1, 1, i) for i in np.flatnonzero(probing).tolist()]
        sample_rows = np.flatnonzero(~probing)
        sample_slots = singles[sample_rows]
        if last := [c for c in chunks if c.start + c.count == self.length[c.slot] and not self._probe[c.slot]]:
            sample_rows = np.concatenate((sample_rows, [c.row + c.count - 1 for c in last]))
            sample_slots = np.concatenate((sample_slots, [c.slot for c in last]))
        copies: list[tuple[int, int]] = []
        if self._twins:
            row_of = dict(zip(sample_slots.tolist(), sample_rows.tolist(), strict=True))
            sample_rows = np.concatenate((sample_rows, [row_of[other.slot] for _, other in self._twins]))
            sample_slots = np.concatenate((sample_slots, [twin.slot for twin, _ in self._twins]))
            for twin, other in self._twins:
                copies += zip(other.pages[twin.registered :], twin.pages[twin.registered :], strict=True)
        return Plan(
            singles=singles,
            lengths=lengths,
            chunks=chunks,
            tokens=tokens,
            positions=position,
            writes=pages.astype(np.int64) * size + offset,
            sample_rows=sample_rows,
            sample_slots=sample_slots,
            sample_positions=position[sample_rows] + 1,
            tenures=self._tenure[sample_slots],
            copies=np.array(copies, np.int64).reshape(-1, 2),
            drafted=np.where(position >= self.length[slot], tokens, -1)[sample_rows],
            probes=probes,
            admitted=self._admitted,
            policies=self._policy[slot],
        )
