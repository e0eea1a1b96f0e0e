"""An amount of a process's memory, with its use and what would lower it."""

from __future__ import annotations

from dataclasses import dataclass

ITEM = {"float32": 4, "bfloat16": 2}  # bytes of a number


@dataclass(frozen=True, slots=True)
class Held:
    """An amount of one process's memory, and its use."""

    what: str
    bytes: int
    lever: str = ""  # the change that would lower it
    lazy: bool = False  # grows with use, and is sized by the free memory
    host: bool = False  # in the machine's own memory, wherever the process computes
    divided: bool = False  # several ranks divide it among all of them, whatever else each holds
    turn: str = ""  # whose turn it is for: given back in the other's, where trainer and engines take turns
