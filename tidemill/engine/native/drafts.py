"""Drafts: guesses at a sequence's next tokens, found where its latest tokens stand before, and their verification.

A draft changes no token and no logprob. The model computes the draft's tokens in one step, each place samples with the noise
that it would have used anyway, and a guess counts only if it is the token that was sampled at the place before it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np

SEPARATOR = -1  # stands between two rows of tokens, and is no token
LEAST_MATCH, MOST_MATCH = 2, 16  # tokens that a place must have in common with the sequence's end; more say nothing new
OF_A_PROMPT = 1 << 15  # tokens of earlier replies to one prompt that are searched, the latest ones
OF_ALL = 1 << 22  # tokens of earlier replies that are kept, of prompts that were used last


def search(text: np.ndarray, suffix: np.ndarray) -> tuple[int, int]:
    """The place after the longest match of `suffix` [S] in `text` [T], and the tokens that match.

    The latest place, if there are several; (0, 0) if there is none. Something must follow it.
    """
    ends = np.flatnonzero(text[:-1] == suffix[-1])  # where the last matching token stands
    ends = ends[text[ends + 1] != SEPARATOR]
    matched = min(len(ends), 1)
    while matched and matched < min(MOST_MATCH, len(suffix)):
        longer = ends[ends >= matched]
        longer = longer[text[longer - matched] == suffix[-1 - matched]]
        if not len(longer):
            break
        ends, matched = longer, matched + 1
    return (int(ends[-1]) + 1, matched) if matched >= LEAST_MATCH else (0, 0)


def continuation(others: list[np.ndarray], own: np.ndarray, most: int) -> tuple[np.ndarray, int]:
    """A draft of at most `most` tokens for the sequence `own` [T], and how many tokens matched before it.

    others: rows in which to search besides. A match near the sequence's own end is taken for a loop, and repeated.
    """
    own = own[-OF_A_PROMPT:]
    text = np.concatenate([part for row in others for part in (row, _BETWEEN)] + [own])
    place, matched = search(text, own[-MOST_MATCH:])
    if not matched:
        return own[:0], 0
    if place >= len(text) - len(own):
        return np.resize(text[place:], most), matched
    draft = text[place : place + most]
    ends = np.flatnonzero(draft == SEPARATOR)
    return draft[: ends[0]] if len(ends) else draft, matched


def accepted(drafted: np.ndarray, slots: np.ndarray, positions: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    """The samples that count, as indices in order of position.

    drafted: the guess that each sample follows, -1 if it follows a known token. slots, positions: those of the samples
    `sampled`. All are [S].
    """
    before: dict[int, int] = {}  # by slot, the token that was sampled at the place before; -1: that place did not count
    counting = list[int]()
    for i in np.argsort(positions, kind="stable").tolist():
        slot, guess = int(slots[i]), int(drafted[i])
        if guess < 0 or before[slot] == guess:
            before[slot] = int(sampled[i])
            counting.append(i)
        else:
            before[slot] = -1
    return np.array(counting, np.int64)


class EarlierReplies:
    """Replies to each prompt, of this version and of earlier ones."""

    def __init__(self) -> None:
        self._by_prompt: OrderedDict[bytes, np.ndarray] = OrderedDict()  # joined by SEPARATOR; prompts used last come last
        self._size = 0

    def add(self, prompt: np.ndarray, reply: np.ndarray) -> None:
        """Keep a reply, with the end of its prompt [P] int32, for later ones to find their beginning."""
        key = key_of(prompt)
        known = self._by_prompt.pop(key, _BETWEEN)
        self._by_prompt[key] = joined = np.concatenate((known, prompt[-MOST_MATCH:], reply, _BETWEEN))[-OF_A_PROMPT:]
        self._size += len(joined) - (0 if known is _BETWEEN else len(known))
        while self._size > OF_ALL and len(self._by_prompt) > 1:
            self._size -= len(self._by_prompt.popitem(last=False)[1])

    def of(self, key: bytes) -> list[np.ndarray]:
        """The replies to the prompt with this key, as rows to search in."""
        if key not in self._by_prompt:
            return []
        self._by_prompt.move_to_end(key)
        return [self._by_prompt[key]]


def key_of(prompt: np.ndarray) -> bytes:
    """The key of a prompt [P] int32 in `EarlierReplies`."""
    return hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()


_BETWEEN = np.array([SEPARATOR], np.int32)
