"""A step's plan: the tokens that it computes, and the sequences that they belong to. Integers only."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tidemill.core.policy_version import PolicyKey
from tidemill.engine.native.kv_blocks import ROOT


@dataclass(slots=True, eq=False)
class Sequence:
    """The scheduler's record of a request."""

    prompt: np.ndarray  # [P] int32
    limit: int  # most tokens that it may hold
    policy: int = 0  # number of the policy that computes it
    probe: bool = False  # scored, not continued: neither reads nor feeds the prefix cache, samples nothing
    last: bool = False  # nothing continues it, so its sampled tokens do not feed the cache
    salt: PolicyKey | None = None  # prefix cache salt; None until admission
    slot: int = -1  # kept while preempted
    pages: list[int] = field(default_factory=list)
    registered: int = 0  # leading pages whose content has been offered to the cache
    chain: int = ROOT  # serial of the last of them
    cached: int = 0  # prompt tokens found in the cache at the first admission
    waiting: bool = True
    released: bool = False


@dataclass(slots=True)
class Chunk:
    """Consecutive tokens of one sequence, computed in one step."""

    slot: int
    start: int  # position of its first token
    count: int
    row: int  # its beginning in the step's flat row of tokens


@dataclass(slots=True)
class Plan:
    """One step. Its flat row of N tokens is the `singles` (longest first), then the chunks."""

    singles: np.ndarray  # [D] slots that compute one token; once more for each token of a draft, which follow
    lengths: np.ndarray  # [D] tokens each of them attends to, its own included
    chunks: list[Chunk]
    tokens: np.ndarray  # [N] int64
    positions: np.ndarray  # [N] int64
    writes: np.ndarray  # [N] int64  where the KV goes: page * page_size + offset
    sample_rows: np.ndarray  # [S] rows whose next token is sampled
    sample_slots: np.ndarray  # [S]
    sample_positions: np.ndarray  # [S] position of that token
    tenures: np.ndarray  # [S] tenures of the slots; they change when a sequence leaves
    copies: np.ndarray  # [C, 2] pages of a sequence and of its twin, copied when the step's KV is written
    probes: list[Chunk]  # rows whose next token is known and scored
    admitted: list[Sequence]  # those that compute for the first time
    # The guess that each sampled row computes, [S]; -1: its token is known.
    drafted: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    policies: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # [N] numbers of the rows' policies
