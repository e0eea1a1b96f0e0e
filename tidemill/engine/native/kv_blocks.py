"""Block manager: ownership of KV pages, and the prefix cache. Integers only.

A page is exactly one of: free, referenced by one or more sequences, or cached (full, unreferenced, findable by content).
Full pages are found again through a hash chain: a page's key is (its parent in the chain, the salt, its tokens). Keys are
compared, not only hashed, and a parent is named by a serial number that is never given twice, so equal keys mean an equal
whole prefix, and a collision of hashes cannot serve the KV of other tokens.

Pages are released from the end of a sequence to its beginning, so a parent is always used more recently than its
children and eviction takes leaves first. Page 0 is never given out: padding reads it and discarded writes go there.

Cached pages are also kept by salt, so that a whole version's pages are retired between two decode steps in constant time:
they are forgotten one by one, as they are given out again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tidemill.core.policy_version import PolicyKey

NULL_PAGE = 0
ROOT = 0  # the serial of the empty prefix


class PageKey(NamedTuple):
    """Key of a full page: the whole prefix by its parent, the salt, and the page's tokens."""

    parent: int  # serial of the page before it, ROOT for the first
    salt: PolicyKey  # of the weights that computed it; pages of different salts are never shared
    tokens: bytes


class BlockManager:
    """Gives out KV pages and finds cached ones by content."""

    def __init__(self, pages: int, page_size: int, prefix_cache: bool = True) -> None:
        """Manage `pages` pages, of which the null page is never given out."""
        assert pages >= 2 and page_size >= 1
        self.pages, self.page_size, self.prefix_cache = pages, page_size, prefix_cache
        self._references = [0] * pages
        self._free = list(range(pages - 1, NULL_PAGE, -1))  # a stack, low pages first, to touch little memory
        self._unreferenced: OrderedDict[int, None] = OrderedDict()  # cached, without a holder; oldest use first
        self._by_salt: dict[PolicyKey, OrderedDict[int, None]] = {}  # those pages by salt, without empty entries
        self._retired: dict[PolicyKey, None] = {}  # salts whose pages are given out first
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

    @property
    def cached_tokens(self) -> int:
        """Tokens in pages that a prompt may still find."""
        return (len(self._by_key) - sum(len(self._by_salt[salt]) for salt in self._retired)) * self.page_size

    def count(self, tokens: int) -> int:
        """Pages that `tokens` tokens need."""
        return -(-tokens // self.page_size)

    def lookup(self, tokens: np.ndarray, salt: PolicyKey) -> tuple[list[int], int]:
        """The cached full pages at the beginning of `tokens` [T] int32, and the last one's serial.

        The serial is ROOT if there are none.
        """
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
        """True if `count` new pages are available while the `shared` ones are held."""
        held = sum(self._references[page] == 0 for page in shared)
        return count <= self.available - held

    def allocate(self, count: int, shared: Sequence[int] = ()) -> list[int]:
        """The pages of a new sequence: a reference on each of `shared`, then `count` new ones."""
        assert self.can_allocate(count, shared)
        for page in shared:
            if self._references[page] == 0:
                self._uncache(page)
            self._references[page] += 1
        return [*shared, *(self._take() for _ in range(count))]

    def append(self, pages: list[int]) -> int:
        """Grow a sequence by one page, which is returned."""
        pages.append(self._take())
        return pages[-1]

    def register(self, page: int, tokens: np.ndarray, parent: int, salt: PolicyKey) -> int:
        """Make a full page findable; returns its serial in the chain.

        If the content is cached already, the earlier page stays.
        """
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
                if (key := self._keys[page]) is None:
                    self._free.append(page)
                else:
                    self._unreferenced[page] = None
                    self._by_salt.setdefault(key.salt, OrderedDict())[page] = None

    def retire(self, salts: Collection[PolicyKey]) -> None:
        """Give out cached pages of other salts first, even before unused pages.

        Memory then does not fill with pages that no request will look for. It takes constant time.
        """
        self._retired = dict.fromkeys(salt for salt in self._by_salt if salt not in salts)

    def _take(self) -> int:
        if self._retired or not self._free:
            page = next(iter(self._by_salt[next(iter(self._retired))] if self._retired else self._unreferenced))
            del self._by_key[self._uncache(page)]
            self._keys[page] = None
        else:
            page = self._free.pop()
        self._references[page] = 1
        return page

    def _uncache(self, page: int) -> PageKey:
        """Take a page out of the unreferenced ones. Returns its key, by which it is still found."""
        key = self._key_of(page)
        del self._unreferenced[page]
        pages = self._by_salt[key.salt]
        del pages[page]
        if not pages:
            del self._by_salt[key.salt]
            self._retired.pop(key.salt, None)
        return key

    def _key_of(self, page: int) -> PageKey:
        key = self._keys[page]
        assert key is not None, "it is not cached"
        return key

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Raise RuntimeError, naming the first contradiction, if the pages do not add up.

        held: the page lists of all sequences.
        """
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
        by_salt = sorted((page, salt) for salt, pages in self._by_salt.items() for page in pages)
        if by_salt != sorted((page, self._key_of(page).salt) for page in cached):
            raise RuntimeError("a cached KV page is not kept under its own salt, and under no other one")
        if not all(self._by_salt.values()) or not self._retired.keys() <= self._by_salt.keys():
            raise RuntimeError("a salt without a cached KV page is kept")
        if sum(k is not None for k in self._keys) != len(self._by_key):
            raise RuntimeError("the prefix cache holds an entry without a page")
