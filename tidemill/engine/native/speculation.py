"""Speculation: which sequences of a step get a draft, and how long it is.

A step's time hardly depends on its number of tokens while these are few, as in the long tail of a batch: then a few
sequences decode alone, and drafts fill the step. The length of a draft follows from the share of guesses that came true
lately, after matches as long as this one: a guess is worth computing if it and all before it come true often enough.
"""

from __future__ import annotations

import numpy as np

from tidemill.engine.native.drafts import MOST_MATCH, EarlierReplies, continuation, key_of
from tidemill.engine.native.engine_settings import SpeculationSettings
from tidemill.engine.native.request_state import ActiveRequest, Slots
from tidemill.engine.native.scheduler import Scheduler
from tidemill.engine.native.step_plan import Plan

TOKENS = 4  # of each live sequence in a step with drafts, at least: with fewer, drafts did not pay
ROW = 0.15  # time of one more token in a step, in steps of none: measured on CPUs; less on devices
BELIEVED = 4.0  # guesses after which what was seen counts as much as what was assumed
ASSUMED = 0.6  # share of guesses that come true, before any was seen
FADES = 0.98  # weight of what was seen, after each further draft
TRIED = 24  # of so many drafts that are not worth their time, one is tried with a single guess
PATIENCE = 8  # most steps without a look for drafts, where steps run ahead


class Speculation:
    """The drafts of an engine's steps, and what became of them."""

    def __init__(self, settings: SpeculationSettings, slots: int) -> None:
        """slots: the most tokens of a step in which every row decodes."""
        self._settings = settings
        self._most = min(settings.step_tokens, slots) if settings.method != "none" else 0
        self._replies = EarlierReplies() if settings.method == "rollouts" else None
        self._seen = np.zeros(MOST_MATCH + 1)  # guesses that were verified, by the length of the match, fading
        self._came_true = np.zeros(MOST_MATCH + 1)
        self._declined = np.zeros(MOST_MATCH + 1, np.int64)
        self._matched: dict[int, int] = {}  # of the drafts in the present step, by slot
        self._wait = self._empty = 0

    def due(self, scheduler: Scheduler, ahead: bool) -> bool:
        """True if drafts should be looked for now. ahead: to look means to wait for the step under way."""
        live = len(scheduler.running)
        if not live or live > self._most // TOKENS or scheduler.waiting_count:
            return False
        self._wait -= 1
        return not ahead or self._wait < 0

    def propose(self, scheduler: Scheduler, rows: Slots) -> dict[int, np.ndarray]:
        """Drafts by slot. All sampled tokens must be known. A grammar knows what follows no sooner, so it gets none."""
        self._matched = {}
        found: dict[int, np.ndarray] = {}
        left = self._most - len(scheduler.running)
        for number, slot in enumerate(scheduler.running):
            length = int(scheduler.length[slot])
            share = -(-left // (len(scheduler.running) - number))
            most = min(share, self._settings.num_speculative_tokens, int(rows.limit[slot]) - length - 1)
            if most < 1 or length - scheduler.computed[slot] != 1 or rows.held[slot]:
                continue
            others = self._others(scheduler, rows, slot) if self._replies is not None else []
            draft, matched = continuation(others, scheduler.tokens[slot, :length], most)
            draft = draft[: self._worthwhile(matched, len(scheduler.running))] if len(draft) else draft
            if (ends := np.flatnonzero(rows.stopped(np.full(len(draft), slot), draft))).size:
                draft = draft[: ends[0]]  # nothing follows what ends a reply
            if len(draft):
                found[slot], self._matched[slot] = draft, matched
                left -= len(draft)
        self._empty = 0 if found else min(self._empty + 1, PATIENCE)
        self._wait = self._empty
        return found

    def learn(self, plan: Plan, here: np.ndarray) -> dict[str, float]:
        """Take note of a step's drafts. here: the samples that counted. Returns amounts to count, by name."""
        if not self._matched:
            return {}
        made, true = plan.sample_slots[plan.drafted >= 0], plan.sample_slots[here][plan.drafted[here] >= 0]
        for slot, matched in self._matched.items():
            guesses, right = int((made == slot).sum()), int((true == slot).sum())
            self._seen[matched] = FADES * self._seen[matched] + min(right + 1, guesses)
            self._came_true[matched] = FADES * self._came_true[matched] + right
        self._matched = {}
        return {"drafted_tokens": len(made), "accepted_tokens": len(true)}

    def finished(self, request: ActiveRequest, reply: np.ndarray) -> None:
        """Keep a reply [n] for later attempts at its prompt."""
        if self._replies is not None and len(reply):
            self._replies.add(request.sequence.prompt, reply)

    def _worthwhile(self, matched: int, live: int) -> int:
        """The most guesses of a draft after so many matching tokens, beside so many live sequences.

        A token that is sampled anyway costs (1 + ROW * live) / live, and one that is guessed ROW over its chance.
        """
        least = ROW * live / (1 + ROW * live)
        share = (self._came_true[matched] + BELIEVED * ASSUMED) / (self._seen[matched] + BELIEVED)
        if share >= least:
            return int(np.log(least) / np.log(min(share, 0.999)))
        self._declined[matched] += 1
        return int(self._declined[matched] % TRIED == 0)

    def _others(self, scheduler: Scheduler, rows: Slots, slot: int) -> list[np.ndarray]:
        """Tokens of other replies to the prompt of a slot's request, earlier and running ones."""
        assert self._replies is not None
        key = self._key(rows, slot)
        running = []
        for other in scheduler.running:
            if other != slot and self._key(rows, other) == key:
                begin = max(0, len(scheduler.running[other].prompt) - MOST_MATCH)
                running.append(scheduler.tokens[other, begin : scheduler.length[other]])
        return [*self._replies.of(key), *running]

    def _key(self, rows: Slots, slot: int) -> bytes:
        request = rows.requests[slot]
        assert request is not None
        request.prompt_key = request.prompt_key or key_of(request.sequence.prompt)
        return request.prompt_key
