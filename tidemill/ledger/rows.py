"""How our nouns become rows."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from tidemill.ledger.records import LedgerError
from tidemill.ledger.segments import Location
from tidemill.types import InfraError, Score, Trajectory, Unscorable

TEXT_LIMIT = 500  # characters of a reply kept in the index; the payload has all of it
_KINDS = {Score: "score", Unscorable: "unscorable", InfraError: "infra_error"}


def trajectory_row(group_id: int, place: int, t: Trajectory, at: Location) -> tuple[Any, ...]:
    """The columns of `trajectories`, in the table's order."""
    versions = t.versions[t.mask]
    sampled = len(versions)
    scored = t.outcome if isinstance(t.outcome, Score) else None
    failed = t.outcome if isinstance(t.outcome, Unscorable | InfraError) else None
    return (
        *(group_id, place, t.sample, t.seat, at.segment, at.offset, at.length, at.crc, None),
        *(len(t.tokens), sampled, t.turns),
        scored.value if scored else None,
        None if t.outcome is None else _KINDS[type(t.outcome)],
        failed.reason if failed else None,
        as_json(scored.parts, "score") if scored and scored.parts else None,
        str(t.finish),
        int(versions.min()) if sampled else None,
        int(versions.max()) if sampled else None,
        t.temperature,
        float(t.logprobs[t.mask].sum(dtype=np.float64)) / sampled if sampled else None,
        t.text[:TEXT_LIMIT].encode(errors="replace").decode(),
    )


def as_json(value: Any, owner: str) -> str:
    """JSON text that SQLite accepts. NaN and infinity, which JSON does not know, become null."""
    try:
        plain = _plain(value)
        text = json.dumps(plain, ensure_ascii=False, allow_nan=False)
        # half of a surrogate pair fits no UTF-8: such text is escaped
        return text if text.isascii() or text.encode(errors="replace").decode() == text else json.dumps(plain)
    except (TypeError, ValueError) as error:
        raise LedgerError(f"{owner} holds something that is not plain JSON: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    return None if isinstance(value, float) and not math.isfinite(value) else value
