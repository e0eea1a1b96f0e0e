"""Row formats: tasks and trajectories as rows of the ledger's tables, figures as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from tidemill.core.errors import LedgerError
from tidemill.core.types import Group, InfraError, Outcome, Score, Task, Trajectory, Unscorable
from tidemill.ledger.segments import Location

TEXT_LIMIT = 500  # characters of a reply kept in the index; the payload has the whole reply
_PIECE = 1 << 14  # tokens summarised at once: for arrays of more the kernel would map new pages again and again
_strict = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_quick = msgspec.json.Encoder()  # also writes NaN and infinity as null
Judged = Mapping[int, Outcome]  # by attempt
KINDS = {Score: "score", Unscorable: "unscorable", InfraError: "infra_error"}


def task_row(task: Task) -> tuple[str, str, str, str, str]:
    """The row (id, env, prompt, data, digest) of a task; equal contents have equal digests."""
    prompt, data = as_json(task.prompt, f"task {task.id!r}"), as_json(task.data, f"task {task.id!r}")
    contents = "\0".join((task.env, task.id, prompt, data)).encode(errors="replace")
    return task.id, task.env, prompt, data, blake2b(contents, digest_size=16).hexdigest()


def trajectory_rows(groups: Iterable[tuple[Group, Sequence[Location]]]) -> list[tuple[Any, ...]]:
    """Rows of the table `trajectories`, one for each trajectory of groups with the given locations."""
    found = [(g.id, i, t, at) for g, places in groups for i, (t, at) in enumerate(zip(g.trajectories, places, strict=True))]
    trajectories = [t for _, _, t, _ in found]
    at_once = max(1, _PIECE * len(found) // max(1, sum(len(t.tokens) for t in trajectories)))
    summaries = [row for i in range(0, len(found), at_once) for row in _sampled(trajectories[i : i + at_once])]
    return [
        (
            *(group, i, t.sample, t.seat, at.segment, at.offset, at.length, at.crc, None),
            *(len(t.tokens), sampled, t.turns, str(t.finish)),
            *versions,
            t.temperature,
            logprob,
            text if (text := t.text[:TEXT_LIMIT]).isascii() else text.encode(errors="replace").decode(),
        )
        for (group, i, t, at), (sampled, *versions, logprob) in zip(found, summaries, strict=True)
    ]


def outcomes_of(group: Group) -> Judged:
    """The outcome of each judged attempt: that of its last trajectory."""
    last = {t.sample: t.outcome for t in group.trajectories}
    return {sample: outcome for sample, outcome in last.items() if outcome is not None}


def outcome_rows(group_id: int, judged: Judged, at: float, judge: str, judgement: int = 0) -> list[tuple[Any, ...]]:
    """Rows of the table `outcomes`, one for each of a group's attempts."""
    rows = []
    for sample, it in judged.items():
        if isinstance(it, Score):
            parts = figures_json(it.parts, "score") if it.parts else None
            turns = as_json([*it.turns], "score") if it.turns else None
            seats = as_json([*it.seats], "score") if it.seats else None
            rows.append((group_id, sample, judgement, at, "score", it.value, None, parts, turns, seats, judge))
        else:
            rows.append((group_id, sample, judgement, at, KINDS[type(it)], None, it.reason, None, None, None, judge))
    return rows


def _sampled(trajectories: Sequence[Trajectory]) -> list[tuple[int, int | None, int | None, float | None]]:
    """The columns (sampled, oldest, newest, mean_logprob) of each trajectory.

    All are computed at once, because calls of NumPy on single ones would dominate. Trajectories without a sampled token, or
    without any token, may stand anywhere among them.
    """
    counts = np.array([np.count_nonzero(t.mask) for t in trajectories], np.int64)
    some = counts > 0  # for an empty stretch, reduceat would return the element after it
    if not some.any():
        return [(0, None, None, None)] * len(trajectories)
    mask = np.concatenate([t.mask for t in trajectories])
    versions = np.concatenate([t.versions for t in trajectories])[mask]
    logprobs = np.concatenate([t.logprobs for t in trajectories])[mask]
    starts = (np.cumsum(counts) - counts)[some]
    oldest, newest = np.minimum.reduceat(versions, starts), np.maximum.reduceat(versions, starts)
    means = np.add.reduceat(logprobs, starts, dtype=np.float64) / counts[some]
    figures = zip(oldest.tolist(), newest.tolist(), means.tolist(), strict=True)
    return [(n, *next(figures)) if n else (0, None, None, None) for n in counts.tolist()]


def figures_json(figures: dict[str, float], owner: str) -> str:
    """Figures as JSON, like `as_json` in a tenth of the time: for every step and trajectory."""
    try:
        return _quick.encode(figures).decode()
    except (TypeError, ValueError):  # a name with half of a surrogate pair, or a NumPy number
        return as_json(figures, owner)


def as_json(value: Any, owner: str) -> str:
    """JSON text for SQLite, with null for NaN and infinity. Raises LedgerError, which names `owner`."""
    try:
        try:
            text = _strict.encode(value)
        except (TypeError, ValueError):
            value = _plain(value)
            text = _strict.encode(value)
        # UTF-8 has no encoding for half of a surrogate pair: such text is escaped
        return text if text.isascii() or text.encode(errors="replace").decode() == text else json.dumps(value)
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
