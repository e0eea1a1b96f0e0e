"""What `env = ...` in a recipe can say: a table with a `kind`, or a short string for it.

"guess"                       {kind = "guess"}
"reasoning_gym:NAME"          {kind = "reasoning_gym", dataset = "NAME"}
"mytask.py:NAME"              {kind = "python", path = "mytask.py:NAME"}
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from tidemill.config import Config


class ReasoningGymSettings(Config):
    """A dataset of reasoning-gym, with its own scorer."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str = Field(description="its name there, such as spell_backward")
    size: int = Field(10000, ge=1, description="training tasks, at most: no question comes twice")
    eval_size: int = Field(1024, ge=1, description="held-out tasks")
    seed: int = 0
    args: dict[str, Any] = Field({}, description="passed to the dataset, such as min_word_len")
    template: str = Field("{question}", description="the prompt; {question} stands for the question")
    answer_tag: str = Field("", description="judge what the last <TAG>...</TAG> holds; empty: the whole reply")
    binary: bool = Field(False, description="1 for the full score and 0 for less: partial scores can be gamed")


class RowsSettings(Config):
    """A file of rows or a Hugging Face dataset, judged by a reward function; by none, where its own replies are learnt."""

    kind: Literal["rows"] = "rows"
    data: str = Field(description="a .jsonl file; or a dataset's folder or name, which needs the datasets package")
    eval_data: str = Field("", description="held-out rows; empty: `eval_share` of `data`, chosen by the prompt's hash")
    eval_share: float = Field(0.1, gt=0, lt=1)
    split: str = Field("train", description="of a Hugging Face dataset")
    prompt_column: str = "prompt"
    answer_column: str = Field("answer", description="the column that rewards know as `answer`")
    reward: str = Field(
        "", description="exact, regex, numeric, last_boxed, math, model, or FILE.py:FUNCTION; empty: nothing judges"
    )
    reward_options: dict[str, Any] = Field({}, description="further arguments of the reward: a tolerance, a model's folder")
    template: str = Field("{prompt}", description="the prompt; {prompt} stands for the row's")


class GuessSettings(Config):
    """A multi-turn game: find a number by guesses that are answered "higher" or "lower"."""

    kind: Literal["guess"] = "guess"
    low: int = Field(1, ge=0)
    high: int = Field(16, ge=1)
    turns: int = Field(5, ge=1, description="guesses allowed")
    size: int = Field(2000, ge=1, description="training tasks, at most")
    eval_size: int = Field(200, ge=1, description="held-out tasks, at most a quarter of all")
    seed: int = 0


class PythonSettings(Config):
    """An environment, or a reward function with its tasks, from the user's file."""

    kind: Literal["python"] = "python"
    path: str = Field(description="FILE.py:NAME or MODULE:NAME")
    data: str = Field("", description="rows as tasks; empty: the environment's own, or `tasks` of the same file")
    eval_data: str = ""
    eval_share: float = Field(0.1, gt=0, lt=1)


NO_REWARD = ("", "none")  # of rows that nothing judges


class EnvironmentWorkers(Config):
    """Worker processes that play the episodes of a user's environment."""

    workers: int | None = Field(
        None, ge=0, description="0 plays in the controller, for breakpoint(); none: 2 for a user's environment, 0 for ours"
    )
    memory_mb: int = Field(0, ge=0, description="address space of a worker in MB; 0 is unlimited")
    limit_s: float = Field(10.0, gt=0, description="seconds without giving control back, before a worker is killed")


AnyEnv = ReasoningGymSettings | RowsSettings | GuessSettings | PythonSettings
KINDS = {kind.model_fields["kind"].default: kind for kind in get_args(AnyEnv)}


def parse_env(value: Any) -> Any:
    """Expand a short string to its table; check the `kind` of a table. Raises ValueError in one sentence."""
    if isinstance(value, str):
        return _expand(value)
    if isinstance(value, Mapping) and str(value.get("kind")) not in KINDS:
        kind = value.get("kind")
        given = "has no kind" if kind is None else f"has the unknown kind {kind!r}{_near(str(kind))}"
        raise ValueError(f"an environment's table {given}: expected one of {', '.join(KINDS)}")
    return value


def _expand(text: str) -> dict[str, Any]:
    kind, _, rest = text.partition(":")
    place, _, name = text.rpartition(":")
    if place.endswith(".py") and name:
        return {"kind": "python", "path": text}
    if kind == "reasoning_gym" and rest:
        return {"kind": kind, "dataset": rest}
    if text == "guess":
        return {"kind": text}
    if text.endswith(".py"):
        raise ValueError(f"environment {text!r} names no object of the file: expected {text}:NAME")
    if text in KINDS:  # it lacks what has no default
        needs = [name for name, field in KINDS[text].model_fields.items() if field.is_required()]
        table = ", ".join([f'kind = "{text}"', *(f"{name} = ..." for name in needs)])
        raise ValueError(f"environment {text!r} needs {' and '.join(needs)}: expected {{{table}}}")
    raise ValueError(f"unknown environment {text!r}{_near(kind)}: expected guess, reasoning_gym:DATASET or FILE.py:NAME")


def _near(name: str) -> str:
    near = difflib.get_close_matches(name, KINDS, n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


EnvSettings = Annotated[Annotated[AnyEnv, Field(discriminator="kind")], BeforeValidator(parse_env)]
