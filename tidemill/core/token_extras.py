"""Token extras: declared arrays with one entry for each token, beside its logprob and its version.

    a loss `reads` it -> GenerateRequest.extras -> Completion [n, *shape] -> Trajectory [T, *shape] -> Sample -> LossInput
                                                                             |-> the ledger's segment

An engine declares in `Capabilities.extras` what it can return, and returns what a request names. What nothing reads does not
travel. A new extra is one declaration; the types that carry it do not change.

Alignment: entry t belongs to token t. A completion has one entry for each sampled token. A trajectory and a sample have one
for each token, which is the declared `fill` where the policy did not sample. Code that joins, cuts or selects tokens does
the same with the entries; code that makes other tokens leaves the extras out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tidemill.core.serialization import DTYPES

TokenExtras = dict[str, np.ndarray]
"""Name -> [tokens, *shape]."""


@dataclass(frozen=True, slots=True)
class TokenExtra:
    """The declaration of an extra. Who returns it and who reads it declare it alike."""

    name: str
    dtype: str  # one of `serialization.DTYPES`
    shape: tuple[int, ...] = ()  # of one token's entry
    fill: float = 0.0  # the entry of a token that the policy did not sample

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"token extra {self.name!r} has dtype {self.dtype!r}: expected one of {', '.join(DTYPES)}")

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype} {list(self.shape)}, fill {self.fill:g}"

    def filled(self, count: int) -> np.ndarray:
        """[count, *shape] entries of tokens that the policy did not sample."""
        return np.full((count, *self.shape), self.fill, self.dtype)


MODEL_LOGPROBS = TokenExtra("model_logprobs", "float32")
"""Logprobs by the unmodified model (temperature 1, no truncation), in nats."""


def taken(declared: Sequence[TokenExtra], returned: Mapping[str, np.ndarray], count: int, engine: str) -> TokenExtras:
    """The declared extras of an engine's `count` tokens. Raises ValueError for one that is not as declared."""
    for extra in declared:
        entries, expected = returned.get(extra.name), (count, *extra.shape)
        if entries is None or entries.shape != expected or entries.dtype != extra.dtype:
            found = "nothing" if entries is None else f"{entries.dtype} {list(entries.shape)}"
            raise ValueError(
                f"engine {engine!r} returned {found} for the token extra {extra.name!r}: expected {extra.dtype} "
                f"{list(expected)}, as its capabilities say"
            )
    return {extra.name: returned[extra.name] for extra in declared}


def joined(declared: Sequence[TokenExtra], turns: Sequence[tuple[int, TokenExtras]]) -> TokenExtras:
    """The declared entries of an episode. turns: for each, the tokens of its message, and the entries of its reply."""
    found = TokenExtras()
    for extra in declared:
        parts = [part for given, reply in turns for part in (extra.filled(given), reply[extra.name])]
        found[extra.name] = np.concatenate([extra.filled(0), *parts]).astype(extra.dtype, copy=False)
    return found


def expect_aligned(extras: Mapping[str, np.ndarray], count: int, owner: str) -> None:
    """Raise ValueError unless every extra has one entry for each of `count` tokens."""
    for name, entries in extras.items():
        if entries.shape[:1] != (count,):
            raise ValueError(f"the token extra {name!r} of {owner} has shape {entries.shape}: expected {count} entries")
