"""Random seeds, derived from the run's seed and the purpose of the number drawn.

Neither the number of workers nor the order of arrival changes the noise that a sample is drawn with.
"""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from a path such as (run seed, "rollout", admission, sample, seat, turn)."""
    text = "/".join(f"{type(p).__name__}:{p}" for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
