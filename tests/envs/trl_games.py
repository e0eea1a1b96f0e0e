"""An environment and rewards as TRL's documentation asks for them, for tests of both."""

from __future__ import annotations

import threading
from typing import Any, Literal


class Vault:
    """A vault with a combination; its state is the instance's."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.resets = 0

    def reset(self, **row: Any) -> str | None:
        self.row, self.tries, self.opened, self.resets = row, 0, False, self.resets + 1
        return f" It has {len(row['digits'])} digits." if row["hint"] else None

    def _same_thread(self) -> None:
        assert threading.get_ident() == self.thread, "called from another thread than it was made in"

    def turn(self, digits: list[int], direction: Literal["left", "right"] = "left") -> dict[str, Any]:
        """
        Turn the dial.

        Args:
            digits: The digits to dial.
            direction: Which way to turn

        Returns:
            What happened.
        """
        self._same_thread()
        if self.opened:
            raise ValueError("It is open.")
        self.tries += 1
        wanted = self.row["digits"] if direction == "left" else self.row["digits"][::-1]
        self.opened = digits == wanted
        return {"opened": self.opened, "right": sum(a == b for a, b in zip(digits, wanted, strict=False))}

    def look(self) -> str:
        """Look at the dial."""
        self._same_thread()
        return f"tried {self.tries} times"

    def get_reward(self) -> float:
        self._same_thread()
        return 1.0 if self.opened else 0.0


def few_tries(environments: list[Vault], digits: list[list[int]], **kwargs: Any) -> list[float]:
    assert all(each.row["digits"] == own for each, own in zip(environments, digits, strict=True))
    return [-0.1 * each.tries for each in environments]


def says_so(completions: list[list[dict[str, Any]]], prompts: list[Any], **kwargs: Any) -> list[float | None]:
    calls = [c["function"] for own in completions for m in own for c in m.get("tool_calls", [])]
    assert all(isinstance(each["arguments"], dict) for each in calls) and len(prompts) == len(completions)
    return [0.5 * ("open" in own[-1]["content"]) if own[-1]["role"] == "assistant" else None for own in completions]


ROWS = [
    {"prompt": [{"role": "user", "content": "Open the vault."}], "digits": [3, 1, 4], "hint": True},
    {"prompt": [{"role": "user", "content": "Open it."}], "digits": [2, 7], "hint": False},
]
