"""`tidemill pairs RUN OUT.jsonl`: preference pairs from a run, for DPO and others.

A pair is the best and the worst attempt of a group by their latest judgement. Not taken are attempts that were cut off, that
have several turns or rows, or that were not asked by the task's prompt. A row keeps the task's other columns for a reward.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.cli.commands.samples import tokenizer_of
from tidemill.cli.commands.screen import console, print_json, print_rows
from tidemill.core.errors import ConfigError, PayloadLost
from tidemill.core.types import GREEDY, Array, Finish, Trajectory
from tidemill.ledger.ledger import SqliteLedger
from tidemill.ledger.records import SampleRow
from tidemill.models.conversations import completion_of, prompt_tokens
from tidemill.models.tokenizer import Tokenizer
from tidemill.run.storage.run_folder import RunFolder

WHOLE = frozenset({Finish.STOP, Finish.ENV_DONE})  # finishes of complete attempts


@dataclass(slots=True)
class PairCounts:
    """The number of pairs, and of groups without one by reason."""

    groups: int = 0
    pairs: int = 0
    alike: int = 0  # no two whole attempts differ in reward
    several_turns: int = 0
    asked_otherwise: int = 0  # not by the task's prompt
    removed: int = 0  # their texts, by retention
    unreadable: int = 0  # their texts: the file is damaged or gone


def pairs(run: Path, out: Path, as_json: bool) -> int:
    if out.exists():
        raise ConfigError(f"{out} exists: give the name of a file that is to be made")
    if out.suffix != ".jsonl":
        raise ConfigError(f"{out} does not end in .jsonl: an environment of rows would not read it")
    found, folder = PairCounts(), RunFolder.existing(run)
    with SqliteLedger(run, mode="read") as record:
        lines = [json.dumps(row) for row in _rows(record, tokenizer_of(folder), found)]
    if not lines:
        raise ConfigError(f"{run} has no task with two attempts that differ in reward: {_left_out(found)}")
    out.write_text("".join(f"{line}\n" for line in lines))
    if as_json:
        print_json({"run": str(run), "out": str(out), **asdict(found)})
    else:
        print_rows(console(), [("pairs", f"{found.pairs:,} in {out}"), ("left out", _left_out(found))])
    return 0


def _rows(record: SqliteLedger, tokenizer: Tokenizer, found: PairCounts) -> Iterator[dict[str, Any]]:
    every = sorted(record.samples(order="recent", limit=2**62), key=lambda row: (row.group_id, row.place))
    for _, attempts in groupby(every, key=lambda row: row.group_id):
        found.groups += 1
        row = _pair(record, tokenizer, [a for a in attempts if a.sample != GREEDY and a.finish != Finish.GIVEN], found)
        if row is not None:
            found.pairs += 1
            yield row


def _pair(
    record: SqliteLedger, tokenizer: Tokenizer, attempts: Sequence[SampleRow], found: PairCounts
) -> dict[str, Any] | None:
    """The row of one group, the first among equals; None, which is counted, if it has none."""
    scored = [(a.latest, -a.place, a) for a in attempts if a.latest is not None and a.finish in WHOLE]
    if not scored or min(scored)[0] == max(scored)[0]:
        found.alike += 1
        return None
    best, worst = max(scored)[2], min(scored, key=lambda each: (each[0], -each[1]))[2]
    if best.gone or worst.gone:
        found.removed += 1
        return None
    try:
        chosen, rejected = (record.load_trajectory(a.group_id, a.place) for a in (best, worst))
    except PayloadLost:
        found.unreadable += 1
        return None
    rows = Counter(a.sample for a in attempts)
    if max(chosen.turns, rejected.turns, rows[best.sample], rows[worst.sample]) > 1:
        found.several_turns += 1
        return None
    task = best.task
    if not all(_answers(each, prompt_tokens(tokenizer, task.prompt)) for each in (chosen, rejected)):
        found.asked_otherwise += 1
        return None
    texts = (completion_of(tokenizer, task.prompt, each.text) for each in (chosen, rejected))
    return {**task.data, "prompt": task.prompt, **dict(zip(("chosen", "rejected"), texts, strict=True))}


def _answers(attempt: Trajectory, prompt: Array) -> bool:
    return bool(attempt.mask.any()) and np.array_equal(attempt.tokens[: int(attempt.mask.argmax())], prompt)


def _left_out(found: PairCounts) -> str:
    left = {"alike": found.alike, "of several turns": found.several_turns}
    left |= {"not asked by the prompt": found.asked_otherwise, "removed by retention": found.removed}
    if found.unreadable:
        left["unreadable"] = found.unreadable
    return ", ".join(f"{count:,} {why}" for why, count in left.items())
