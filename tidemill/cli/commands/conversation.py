"""Shows one attempt as a conversation, with its reward and the limit that cut it off.

payload with messages      each message under its role, the policy's own under "policy"
payload without (older)    its tokens, cut where their provenance changes, decoded
no payload                 the task's prompt and the last reply, from the index

A segment is a maximal stretch of tokens of one provenance, as recorded when they were made (I7): the prompt, or what stands
before a branch in another row; tokens that the policy sampled, or that the task gave to be learnt; and tokens that the
environment added later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from rich.text import Text

from tidemill.cli.commands.screen import Row
from tidemill.core.episode_counts import counts_in, worded_counts
from tidemill.core.types import Said, Score, Trajectory
from tidemill.ledger.records import SampleRow
from tidemill.models.tokenizer import Tokenizer
from tidemill.observability.diagnosis.cuts import limit_of, named
from tidemill.observability.safe_text import visible

SHOWN = 600  # characters of a message
MOST_LABEL = 12  # characters of a role, which an environment may name freely
Decode = Callable[[], Tokenizer | None]
Provenance = Literal["prompt", "parent", "sampled", "given", "environment"]
COLOURS: dict[Provenance, str] = {
    "prompt": "cyan",
    "parent": "cyan",
    "sampled": "green",
    "given": "blue",
    "environment": "magenta",
}


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens from `start` to `stop` of one provenance."""

    provenance: Provenance
    start: int
    stop: int


def segments(t: Trajectory) -> list[Segment]:
    """The segments of a trajectory, in order."""
    position = 0 if t.parent is None else t.parent[1]
    begun, found = position > 0, [Segment("parent", 0, position)] if position else []
    own: Provenance = "sampled" if t.given is None else "given"
    for learnt, run in groupby(t.learnt[position:].tolist()):
        length = len(list(run))
        found.append(Segment(own if learnt else "environment" if begun else "prompt", position, position + length))
        position, begun = position + length, begun or learnt
    return found


def rows_of(row: SampleRow, payload: Trajectory | None, tokenizer: Decode) -> list[Row]:
    """The messages in order, and the task's own answer."""
    if payload is not None and payload.said:
        rows = [_message_row(said) for said in payload.said]
    elif payload is not None and (found := tokenizer()) is not None:
        rows: list[Row] = [
            (Text(each.provenance, COLOURS[each.provenance]), _cut(text_of(payload, each, found)))
            for each in segments(payload)
        ]
    else:
        rows = [*_asked(row), (Text("reply", COLOURS["sampled"]), _cut(row.text))]
    return [*rows, *answer_row(row)]


def facts_of(payload: Trajectory | None) -> list[Row]:
    """The limit that ended the last reply early, the parts of its reward, and what its tools and its agent counted."""
    if payload is None:
        return []
    rows: list[Row] = []
    if (limit := limit_of(payload)) is not None:
        rows.append(("cut off", Text(f"by {named(limit)}", "yellow")))
    if isinstance(payload.outcome, Score) and (payload.outcome.parts or payload.outcome.turns):
        rows.append(("reward", _parts(payload.outcome)))
    return [*rows, *worded_counts(counts_in(payload.info))]


def answer_row(row: SampleRow) -> list[Row]:
    """The task's own answer, if it has one under the usual name."""
    answer = row.task.data.get("answer")
    return [] if answer is None else [("answer", _cut(str(answer)))]


def plain(payload: Trajectory | None, tokenizer: Decode) -> dict[str, Any]:
    """The conversation as JSON data; null where retention removed the payload."""
    if payload is None:
        return dict.fromkeys(("conversation", "reward_parts", "reward_turns", "cut_off", "counts", "parent"))
    limit, outcome = limit_of(payload), payload.outcome
    said = [(each.role, each.text, each.policy) for each in payload.said]
    if not said and (found := tokenizer()) is not None:
        said = [(s.provenance, text_of(payload, s, found), s.provenance == "sampled") for s in segments(payload)]
    return {
        "conversation": [{"role": role, "content": text, "policy": policy} for role, text, policy in said] or None,
        "reward_parts": outcome.parts if isinstance(outcome, Score) else None,
        "reward_turns": [*outcome.turns] if isinstance(outcome, Score) else None,
        "cut_off": None if limit is None else {"by": limit[0], "tokens": limit[1]},
        "counts": counts_in(payload.info),
        "parent": None if payload.parent is None else {"row": payload.parent[0], "position": payload.parent[1]},
    }


def _message_row(said: Said) -> Row:
    label, colour = ("policy", COLOURS["sampled"]) if said.policy else (visible(said.role), _colour(said.role))
    return Text(label[:MOST_LABEL], colour), _cut(said.text)


def _colour(role: str) -> str:
    return COLOURS["prompt"] if role in ("system", "developer", "user") else COLOURS["environment"]


def _asked(row: SampleRow) -> list[Row]:
    prompt, label = row.task.prompt, Text("prompt", COLOURS["prompt"])
    if isinstance(prompt, str):
        return [(label, _cut(prompt))]
    return [_message_row(Said(str(message.get("role")), str(message.get("content")))) for message in prompt]


def _parts(score: Score) -> str:
    parts = [f"{visible(name)} {value:g}" for name, value in score.parts.items()]
    turns = [f"turns {', '.join(f'{value:g}' for value in score.turns)}"] if score.turns else []
    return f"{score.value:g}: {'; '.join([', '.join(parts), *turns] if parts else turns)}"


def text_of(payload: Trajectory, segment: Segment, tokenizer: Tokenizer) -> str:
    """The text of a segment, special tokens included."""
    return tokenizer.decode(payload.tokens[segment.start : segment.stop].tolist(), skip_special_tokens=False)


def _cut(text: str) -> str:
    more = f" … {len(text) - SHOWN:,} more characters" if len(text) > SHOWN else ""
    return visible(text[:SHOWN]) + more
