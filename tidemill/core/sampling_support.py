"""Supports: the token ids that each position of a reply was sampled from, where these were not the whole vocabulary.

Logprobs are those of the distribution over these ids, and a trainer reproduces them over the same ids. Truncation keeps
few ids, others at each position. A grammar may keep nearly all ids, and the same ones at many positions: so a set is stored
as the ids that it lacks where these are fewer, and positions may share it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

_NONE = np.zeros(0, np.int32)


@dataclass(slots=True)
class Support:
    """Token ids that each of T positions was sampled from. Set s lists `ids[offsets[s]:offsets[s + 1]]`."""

    ids: np.ndarray  # [sum of the lists] int32
    offsets: np.ndarray  # [S + 1] int32
    sets: np.ndarray | None = None  # [T] int32: the set of each position; None: position t has set t
    lacks: np.ndarray | None = None  # [S] bool: the set is all ids but those that it lists; None: no set is

    @property
    def positions(self) -> int:
        """T, the number of positions."""
        return len(self.offsets) - 1 if self.sets is None else len(self.sets)

    @property
    def set_of_each(self) -> np.ndarray:
        """[T] the set of each position."""
        return np.arange(len(self.offsets) - 1, dtype=np.int32) if self.sets is None else self.sets

    @property
    def lacking(self) -> np.ndarray:
        """[S] bool: True for the sets of all ids but those that they list."""
        return np.zeros(len(self.offsets) - 1, bool) if self.lacks is None else self.lacks

    def at(self, position: int, vocab: int) -> np.ndarray:
        """The ids that one position was sampled from."""
        number = int(self.set_of_each[position])
        listed = self.ids[self.offsets[number] : self.offsets[number + 1]]
        if not self.lacking[number]:
            return listed
        kept = np.ones(vocab, bool)
        kept[listed] = False
        return np.flatnonzero(kept).astype(np.int32)

    def check(self, positions: int) -> None:
        """Raise ValueError unless this is the support of so many positions."""
        count = len(self.offsets) - 1
        sound = len(self.offsets) > 0 and self.offsets[0] == 0 and self.offsets[-1] == len(self.ids)
        sound = sound and bool((np.diff(self.offsets) >= 0).all()) and (self.lacks is None or len(self.lacks) == count)
        if sound and self.sets is not None and len(self.sets):
            sound = int(self.sets.min()) >= 0 and int(self.sets.max()) < count
        if not sound:
            raise ValueError("a support whose lists, sets and positions contradict one another")
        if self.positions != positions:
            raise ValueError(f"a support of {self.positions} positions for {positions} sampled tokens")


def joined_support(parts: Iterable[tuple[Support | None, int]]) -> Support | None:
    """The supports of several stretches of sampled tokens as one; None if all of them had the whole vocabulary.

    parts: the support of each, None for the whole vocabulary, and its number of tokens.
    """
    every = list(parts)
    if all(support is None for support, _ in every):
        return None
    whole = Support(_NONE, np.zeros(2, np.int32), lacks=np.ones(1, bool))
    known = [replace(whole, sets=np.zeros(count, np.int32)) if support is None else support for support, count in every]
    for support, (_, count) in zip(known, every, strict=True):
        support.check(count)
    sizes = np.cumsum([0, *(len(each.ids) for each in known)])
    sets = np.cumsum([0, *(len(each.offsets) - 1 for each in known)])
    shifted = [each.offsets[1:] + size for each, size in zip(known, sizes, strict=False)]
    numbers = [each.set_of_each + first for each, first in zip(known, sets, strict=False)]
    return Support(
        np.concatenate([each.ids for each in known]),
        np.concatenate([np.zeros(1, np.int32), *shifted]).astype(np.int32),
        None if all(each.sets is None for each in known) else np.concatenate(numbers).astype(np.int32),
        None if all(each.lacks is None for each in known) else np.concatenate([each.lacking for each in known]),
    )


@dataclass(slots=True)
class SupportRecord:
    """A support that grows by positions."""

    _lists: list[np.ndarray] = field(default_factory=list)
    _lacks: list[bool] = field(default_factory=list)
    _sets: list[int] = field(default_factory=list)
    _known: dict[bytes, int] = field(default_factory=dict)  # sets that positions share, by their mask

    def add(self, ids: np.ndarray) -> None:
        """Add a position that was sampled from these ids."""
        self._sets.append(self._new(ids, False))

    def add_mask(self, kept: np.ndarray) -> None:
        """Add a position that was sampled from the ids where `kept` [V] bool is true."""
        key = np.packbits(kept).tobytes()
        if (number := self._known.get(key)) is None:
            lacks = 2 * int(np.count_nonzero(kept)) > len(kept)
            number = self._known[key] = self._new(np.flatnonzero(kept != lacks).astype(np.int32), lacks)
        self._sets.append(number)

    def support(self) -> Support:
        """The support of the positions so far."""
        offsets = np.zeros(len(self._lists) + 1, np.int32)
        np.cumsum([len(each) for each in self._lists], out=offsets[1:])
        ids = np.concatenate(self._lists).astype(np.int32, copy=False) if self._lists else _NONE
        plain = self._sets == list(range(len(self._lists)))
        lacks = np.array(self._lacks, bool) if any(self._lacks) else None
        return Support(ids, offsets, None if plain else np.array(self._sets, np.int32), lacks)

    def _new(self, ids: np.ndarray, lacks: bool) -> int:
        self._lists.append(ids)
        self._lacks.append(lacks)
        return len(self._lists) - 1
