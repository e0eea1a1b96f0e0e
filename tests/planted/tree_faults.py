"""Faults of attempts as trees: where a branch begins, what it trains, and which row is the last. See `faults`."""

from __future__ import annotations

from faults import Fault

TREE_FAULTS = [
    Fault(
        "a second answer is put behind the first",
        "if row.nodes and row.nodes[-1].end == position:",
        "if row.nodes:",
        "envs/test_attempt_trees.py",
    ),
    Fault(
        "the attempt ends with the row that was begun last",
        "        if own is rows[-1]:\n            return found",
        "        if True:\n            return found",
        "envs/test_attempt_trees.py",
    ),
    Fault(
        "every conversation begins anew",
        "                if met and is_reply(left[count], each.text, each.message):",
        "                if False:",
        "envs/test_attempt_trees.py",
    ),
    Fault(
        "a branch begins within the text of an added token",
        "name, place - before) for name in names for before in range(1, min(len(name), place + 1))",
        "name, place - before) for name in names for before in range(0)",
        "models/test_template_formats.py",
    ),
    Fault(
        "a branch keeps what no policy sampled",
        "        return least if sampled[:least].any() else 0",
        "        return least",
        "envs/test_attempt_trees.py envs/test_chat.py models/test_template_formats.py",
    ),
    Fault(
        "an attempt is as old as its last row",
        "return min((t.oldest for t in self.trajectories if t.mask.any()), default=None)",
        "return min((t.oldest for t in self.ends if t.mask.any()), default=None)",
        "controller/test_lag_of_trees.py",
    ),
    Fault(
        "of an attempt of several rows the last one's replies may be rewarded",
        "    return sum(row.replies for row in rows)",
        "    return rows[-1].replies",
        "controller/test_rollout.py",
    ),
    Fault(
        "a worker's conversations wait for each other",
        "waits = not note.whole and any(",
        "waits = any(",
        "envs/test_environment_workers.py",
    ),
]
