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
    """Salts of conversations, by policy and key: an episode may ask several policies."""

    def __init__(self) -> None:
        # The salt, and the length and digest of the tokens.
        self._by_key: OrderedDict[tuple[str, str], tuple[PolicyKey, int, bytes]] = OrderedDict()

    def remember(self, key: str, salt: PolicyKey, tokens: np.ndarray) -> None:
        """Note that the conversation `key` with the policy of the salt has reached `tokens` [T] int32."""
        place = salt.policy, key
        self._by_key[place] = salt, len(tokens), _digest(tokens)
        self._by_key.move_to_end(place)
        if len(self._by_key) > REMEMBERED:
            self._by_key.popitem(last=False)

    def salt(self, key: str, policy: str, tokens: np.ndarray) -> PolicyKey | None:
        """The salt for a prompt that continues the conversation `key` with a policy; None for any other."""
        salt, length, digest = self._by_key.get((policy, key), (None, 0, b""))
        return salt if len(tokens) > length and _digest(tokens[:length]) == digest else None


def _digest(tokens: np.ndarray) -> bytes:
    return hashlib.blake2b(tokens.astype(np.int32).tobytes(), digest_size=16).digest()
