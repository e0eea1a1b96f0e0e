"""Table of the rewards that a recipe can name without a file, as in `reward = "numeric"`."""

from __future__ import annotations

import difflib
import importlib.util
from dataclasses import dataclass

from tidemill.core.errors import ConfigError
from tidemill.envs.rewards.signature import Signature


@dataclass(frozen=True, slots=True)
class Named:
    """A named reward: its function, its options, and the form of its gold reply."""

    reference: str
    gold: str  # template of a right reply, with {answer}; empty: it cannot be derived from the answer
    options: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # options without a default
    package: str = ""  # optional package that it imports in the worker
    asks: tuple[str, ...] = ("completion", "answer")


BOXED = "\\boxed{{{answer}}}"

# Written here instead of inspected: inspecting `math` would import its package into the controller.
NAMED = {
    "exact": Named("tidemill.envs.rewards.functions:exact", "{answer}", options=("normalise",)),
    "regex": Named("tidemill.envs.rewards.functions:regex", "", options=("pattern", "normalise"), needs=("pattern",)),
    "numeric": Named("tidemill.envs.rewards.functions:numeric", "{answer}", options=("tolerance",)),
    "last_boxed": Named("tidemill.envs.rewards.functions:last_boxed", BOXED),
    "math": Named("tidemill.envs.rewards.math:score", BOXED, package="math_verify"),
    "code": Named(
        "tidemill.envs.rewards.code:score",
        "{answer}",
        options=("tests", "cases", "entry_point", "partial", "sandbox", "budget_s"),
        asks=("completion",),
    ),
    "model": Named(
        "tidemill.envs.reward_model:score", "", options=("folder",), needs=("folder",), asks=("completions", "prompts")
    ),
}


def named_reward(name: str) -> tuple[str, Signature]:
    """Reference and signature of a named reward. Raises ConfigError when it or its package is missing."""
    if name not in NAMED:
        near = difflib.get_close_matches(name, NAMED, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(NAMED)}; or FILE.py:FUNCTION"
        raise ConfigError(f"unknown reward {name!r}; {hint}")
    reward = NAMED[name]
    if reward.package and importlib.util.find_spec(reward.package) is None:
        raise ConfigError(f"reward {name!r} needs a package that is not installed: pip install 'tidemill[gym]'")
    optional = tuple(option for option in reward.options if option not in reward.needs)
    return reward.reference, Signature(name, "completions" in reward.asks, (*reward.asks, *reward.needs), optional)
