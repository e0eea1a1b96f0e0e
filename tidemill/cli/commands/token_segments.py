"""Cuts a trajectory's tokens into segments by provenance, and names their colours.

A segment is a maximal stretch of tokens of one provenance, as recorded when they were made (I7): the prompt; tokens that the
policy sampled, or that the task gave to be learnt; and tokens that the environment added later.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from rich.text import Text

from tidemill.core.types import Trajectory

Provenance = Literal["prompt", "sampled", "given", "environment"]
Row = tuple[str | Text, str | Text]
COLOURS: dict[Provenance, str] = {"prompt": "cyan", "sampled": "green", "given": "blue", "environment": "magenta"}


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens from `start` to `stop` of one provenance."""

    provenance: Provenance
    start: int
    stop: int


def segments(t: Trajectory) -> list[Segment]:
    """The segments of a trajectory, in order."""
    found, position, begun = [], 0, False
    own: Provenance = "sampled" if t.given is None else "given"
    for learnt, run in groupby(t.learnt.tolist()):
        length = len(list(run))
        found.append(Segment(own if learnt else "environment" if begun else "prompt", position, position + length))
        position, begun = position + length, begun or learnt
    return found
