"""Drafts: where they are found, how long they are, and which of their guesses count."""

from __future__ import annotations

import numpy as np
import pytest

from tidemill.engine.native import drafts
from tidemill.engine.native.drafts import EarlierReplies, accepted, continuation, key_of, search


def row(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


@pytest.mark.parametrize(
    ("others", "own", "expected", "matched"),
    [
        ([], [1, 2, 3, 4, 1, 2], [3, 4, 1, 2, 3, 4], 2),  # a loop goes on
        ([], [1, 2, 3, 9, 2, 3, 8, 1, 2, 3], [9, 2, 3, 8, 1, 2], 3),  # the longest match, not the latest
        ([], [2, 3, 9, 2, 3, 8, 2, 3], [8, 2, 3, 8, 2, 3], 2),  # of equal ones the latest
        ([], [1, 2, 3, 4], [], 0),
        ([], [7, 2, 8, 2], [], 0),  # a single token says too little
        ([], [5], [], 0),
        ([[4, 5, 6, 7]], [9, 4, 5], [6, 7], 2),  # as far as the other row goes
        ([[4, 5], [6, 7]], [9, 4, 5], [], 0),  # rows do not continue one another
        ([[8, 9, 4, 5, 1]], [4, 5, 2, 8, 9, 4, 5], [1], 4),
        ([[4, 5, 1]], [4, 5, 2, 4, 5], [2, 4, 5, 2, 4, 5], 2),  # the sequence's own tokens before those of others
    ],
)
def test_a_draft_continues_the_longest_match(others, own, expected, matched) -> None:
    draft, found = continuation([row(*other) for other in others], row(*own), 6)
    assert (draft.tolist(), found) == (expected, matched)


def test_search_equals_a_plain_loop() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        text, suffix = rng.integers(-1, 3, 60), rng.integers(0, 3, rng.integers(2, 20))
        best = (0, 0)
        for place in range(1, len(text)):
            matched = 0
            while matched < min(place, len(suffix), 16) and text[place - 1 - matched] == suffix[-1 - matched]:
                matched += 1
            if text[place] >= 0 and matched >= max(best[1], 2):
                best = place, matched
        assert search(text, suffix) == best


def test_guesses_count_as_far_as_they_were_sampled() -> None:
    drafted = np.array([-1, 5, 6, 7, -1, 5, -1])
    slots = np.array([3, 3, 3, 3, 0, 0, 2])
    positions = np.array([10, 11, 12, 13, 40, 41, 7])
    sampled = np.array([5, 6, 9, 7, 4, 5, 1])  # slot 3: 7 was guessed for 9; slot 0: 5 was guessed for 4
    assert sorted(accepted(drafted, slots, positions, sampled).tolist()) == [0, 1, 2, 4, 6]
    turned = np.array([3, 2, 1, 0, 5, 4, 6])  # the order of rows does not matter, and positions come in order
    found = turned[accepted(drafted[turned], slots[turned], positions[turned], sampled[turned])]
    assert sorted(found.tolist()) == [0, 1, 2, 4, 6] and [i for i in found if slots[i] == 3] == [0, 1, 2]


def test_replies_are_found_by_their_prompt_and_the_oldest_are_dropped(monkeypatch) -> None:
    monkeypatch.setattr(drafts, "OF_A_PROMPT", 12)
    monkeypatch.setattr(drafts, "OF_ALL", 30)
    kept = EarlierReplies()
    first, second = row(1, 2), row(3, 4)
    for prompt, reply in ((first, row(7, 8)), (second, row(9)), (first, row(5, 6))):
        kept.add(prompt, reply)
    assert [part.tolist() for part in kept.of(key_of(first))] == [[-1, 1, 2, 7, 8, -1, 1, 2, 5, 6, -1]]
    assert kept.of(key_of(row(1))) == []
    kept.add(first, row(7))
    assert kept.of(key_of(first))[0].tolist() == [2, 7, 8, -1, 1, 2, 5, 6, -1, 1, 2, 7, -1][-12:]
    for i in range(10, 14):
        kept.of(key_of(first))  # asked for, so it stays
        kept.add(row(i), row(1, 1))
    assert kept.of(key_of(first)) and not kept.of(key_of(second)) and kept.of(key_of(row(13)))
