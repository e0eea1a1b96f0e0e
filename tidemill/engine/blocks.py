"""Which KV page belongs to whom. Integers only.

A page is exactly one of: free, referenced by one or more sequences, or cached (full, unreferenced, findable by content).
Full pages are found again through a hash chain: a page's key is (its parent in the chain, the salt, its tokens). Keys are
compared, not only hashed, and a parent is named by a serial number that is never given twice, so equal keys mean an equal
whole prefix, and a collision of hashes cannot serve the KV of other tokens.

Pages are released from the end of a sequence to its beginning, so a parent is always used more recently than its
children and eviction takes leaves first. Page 0 is never given out: padding reads it and discarded writes go there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

NULL_PAGE = 0
ROOT = 0  # the serial of the empty prefix


class PageKey(NamedTuple):
    parent: int  # serial of the page before it, ROOT for the first
    salt: tuple[int, int]
    tokens: bytes


class BlockManager:
    def __init__(self, pages: int, page_size: int, prefix_cache: bool = True) -> None:
        """`pages` counts the null page: pages - 1 can be given out."""
        assert pages >= 2 and page_size >= 1
        self.pages, self.page_size, self.prefix_cache = pages, page_size, prefix_cache
        self._references = [0] * pages
        self._free = list(range(pages - 1, NULL_PAGE, -1))  # a stack: low pages first, so that little memory is touched
        self._unreferenced: OrderedDict[int, None] = OrderedDict()  # cached pages nobody holds, least recently used first
        self._by_key: dict[PageKey, int] = {}
        self._keys: list[PageKey | None] = [None] * pages
        self._serials = [ROOT] * pages
        self._next_serial = ROOT + 1

    @property
    def usable(self) -> int:
        return self.pages - 1

    @property
    def available(self) -> int:
        """Pages that can be given out now."""
        return len(self._free) + len(self._unreferenced)

    def count(self, tokens: int) -> int:
        """Pages that `tokens` tokens need."""
        return -(-tokens // self.page_size)

    def lookup(self, tokens: np.ndarray, salt: tuple[int, int]) -> tuple[list[int], int]:
        """The cached full pages that `tokens` [T] int32 begins with, and the serial of the last (ROOT when none)."""
        found: list[int] = []
        serial = ROOT
        if self.prefix_cache:
            for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
                page = self._by_key.get(PageKey(serial, salt, tokens[start : start + self.page_size].tobytes()))
                if page is None:
                    break
                found.append(page)
                serial = self._serials[page]
        return found, serial

    def can_allocate(self, count: int, shared: Sequence[int] = ()) -> bool:
        """Whether `count` new pages can be had beside holding the `shared` ones."""
        held = sum(page in self._unreferenced for page in shared) if shared else 0
        return count <= self.available - held

    def allocate(self, count: int, shared: Sequence[int] = ()) -> list[int]:
        """The pages of a new sequence: a reference on each of `shared`, then `count` new ones."""
        assert self.can_allocate(count, shared)
        for page in shared:
            self._references[page] += 1
            self._unreferenced.pop(page, None)
        return [*shared, *(self._take() for _ in range(count))]

    def append(self, pages: list[int]) -> int:
        """Grow a sequence by one page, which is returned."""
        pages.append(self._take())
        return pages[-1]

    def register(self, page: int, tokens: np.ndarray, parent: int, salt: tuple[int, int]) -> int:
        """Make a full page findable; returns its serial in the chain. Content that is cached already stays where it is."""
        key = PageKey(parent, salt, tokens.tobytes())
        known = self._by_key.setdefault(key, page)
        if known == page and self._keys[page] is None:
            self._keys[page] = key
            self._serials[page] = self._next_serial
            self._next_serial += 1
        return self._serials[known]

    def free(self, pages: Iterable[int]) -> None:
        """Give back one reference on each page of a sequence."""
        for page in reversed(list(pages)):
            assert self._references[page] > 0, f"page {page} is freed more often than it was given"
            self._references[page] -= 1
            if self._references[page] == 0:
                if self._keys[page] is None:
                    self._free.append(page)
                else:
                    self._unreferenced[page] = None

    def retire(self, salts: Collection[tuple[int, int]]) -> None:
        """Forget cached pages of other salts than these. They are given out again before pages that were never touched, so
        that memory does not fill with what nobody will look for."""
        for page in [page for page in self._unreferenced if self._key_of(page).salt not in salts]:
            del self._unreferenced[page]
            self._forget(page)
            self._free.append(page)

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._unreferenced.popitem(last=False)
            self._forget(page)
        self._references[page] = 1
        return page

    def _forget(self, page: int) -> None:
        del self._by_key[self._key_of(page)]
        self._keys[page] = None

    def _key_of(self, page: int) -> PageKey:
        key = self._keys[page]
        assert key is not None, "it is not cached"
        return key

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """`held` are the page lists of all sequences. Raises RuntimeError naming the first contradiction."""
        expected = [0] * self.pages
        for pages in held:
            for page in pages:
                expected[page] += 1
        if expected != self._references:
            wrong = [(p, n, r) for p, (n, r) in enumerate(zip(expected, self._references, strict=True)) if n != r]
            raise RuntimeError(f"KV pages leaked: (page, holders, counted references) = {wrong[:8]}")
        free, cached = set(self._free), set(self._unreferenced)
        if len(free) != len(self._free) or free & cached or NULL_PAGE in free | cached:
            raise RuntimeError("a KV page is free twice, free and cached, or is the null page")
        for page in range(1, self.pages):
            if (page in free) + (page in cached) + (expected[page] > 0) != 1:
                raise RuntimeError(
                    f"KV page {page} is not exactly one of free, cached, referenced ({expected[page]} holders)"
                )
            key = self._keys[page]
            if (page in cached and key is None) or (page in free and key is not None):
                raise RuntimeError(f"KV page {page}: its place and its cache entry disagree")
            if key is not None and self._by_key.get(key) != page:
                raise RuntimeError(f"KV page {page} is cached under a key that finds another page")
        if sum(k is not None for k in self._keys) != len(self._by_key):
            raise RuntimeError("the prefix cache holds an entry without a page")
