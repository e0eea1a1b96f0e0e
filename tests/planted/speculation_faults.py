"""Faults of speculation and of the sampling check: see `faults`."""

from __future__ import annotations

from faults import Fault

SPECULATION_FAULTS = [
    Fault(
        "a draft is accepted without a look",
        "if guess < 0 or before[slot] == guess:",
        "if guess < 0 or before[slot] >= 0:",
        "engine/native/test_drafts.py engine/native/test_speculation.py",
    ),
    Fault(
        "a draft's places share one noise",
        "params = self._slots.params(slots, plan.sample_positions)",
        "params = self._slots.params(slots, self._scheduler.length[slots])",
        "engine/native/test_speculation.py",
    ),
    Fault(
        "a rejected draft's KV is kept",
        "np.add.at(self.computed, more, 1)",
        "np.add.at(self.computed, plan.sample_slots[plan.drafted >= 0], 1)",
        "engine/native/test_speculation.py",
    ),
    Fault(
        "a draft's pages get into the prefix cache",
        "        self._register(sequence, computed if kept is None else min(kept, computed))\n",
        "        self._register(sequence, computed if sequence.probe else len(sequence.pages) * self.blocks.page_size)\n",
        "engine/native/test_speculation.py",
    ),
    Fault(
        "a draft goes on after what ends a reply",
        "draft = draft[: ends[0]]  # nothing follows what ends a reply",
        "draft = draft[:]",
        "engine/native/test_speculation.py",
    ),
    Fault(
        "a draft goes past the most tokens of a reply",
        "int(rows.limit[slot]) - length - 1)",
        "int(rows.limit[slot]) - length + 3)",
        "engine/native/test_speculation.py",
    ),
    Fault(
        "two threads share a draft",
        "    return begins[np.searchsorted(begins, len(slots) * np.arange(threads + 1) // threads)]\n",
        "    return len(slots) * np.arange(threads + 1) // threads\n",
        "engine/native/test_speculation.py",
    ),
    Fault(
        "a run does not look at what engines sample with drafts",
        "        await self.hooks.served(served)\n",
        "",
        "controller/test_sampling_check.py cli/commands/test_engine_check.py",
    ),
    Fault(
        "frequencies of draft-sampled tokens are not compared",
        "if self.freedom and self.chi_square > self.most:",
        "if self.freedom > 10**9:",
        "controller/test_sampling_check.py",
    ),
    Fault(
        "an audit's result is lost",
        "            await engine.audit()\n            audit =",
        "            audit =",
        "cli/commands/test_engine_check.py",
    ),
]
