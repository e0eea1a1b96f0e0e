"""Remembers the KV salt of each conversation between its turns (`in_flight = "keep"`).

Only a request that continues this very sequence gets the salt: a key that is used again for something else must not find KV
of old weights.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np

from tidemill.core.policy_version import PolicyKey

REMEMBERED = 16384  # conversations; the oldest are dropped first


class KeptConversations:
    """Salts of conversations, by key."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[str, tuple[PolicyKey, int, bytes]] = OrderedDict()  # salt, length and digest of the tokens

    def remember(self, key: str, salt: PolicyKey, tokens: np.ndarray) -> None:
        """Note that the conversation `key` has reached `tokens` [T] int32."""
        self._by_key[key] = salt, len(tokens), _digest(tokens)
        self._by_key.move_to_end(key)
        if len(self._by_key) > REMEMBERED:
            self._by_key.popitem(last=False)

    def salt(self, key: str, tokens: np.ndarray) -> PolicyKey | None:
        """The salt for a prompt that continues the conversation `key`; None for any other."""
        salt, length, digest = self._by_key.get(key, (None, 0, b""))
        return salt if len(tokens) > length and _digest(tokens[:length]) == digest else None


def _digest(tokens: np.ndarray) -> bytes:
    return hashlib.blake2b(tokens.astype(np.int32).tobytes(), digest_size=16).digest()
