"""Settings behind `env = ...` in a recipe: a table with a `kind`, a short form, or several tables.

"guess"                       {kind = "guess"}
"reasoning_gym:NAME"          {kind = "reasoning_gym", dataset = "NAME"}
"mytask.py:NAME"              {kind = "python", path = "mytask.py:NAME"}
[{kind = ..., name = "a", weight = 3}, {kind = ..., name = "b"}]
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    FiniteFloat,
    Tag,
    field_validator,
    model_validator,
)

from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.core.config import Config, build, dump

HEAVIEST = 1000
NO_REWARD = ("", "none")  # values of `reward` for rows that nothing judges
WIDEST = 200  # numbers between the ends of a guessing game
KIND = "Kind of environment"
EVAL_SHARE = "Share of data that is held out while eval_data is empty"
WEIGHTS = "Weights of a list of rewards, one for each. Empty: 1 each"


def _names(given: Any) -> Any:
    """Check a name, or a list of names that is not empty. Raises ValueError in one sentence."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list | tuple) or not given or not all(isinstance(each, str) and each for each in given):
        raise ValueError(f"{given!r:.60}: expected a name, or a list of names")
    return tuple(given)


Names = Annotated[str | tuple[str, ...], BeforeValidator(_names)]


def _with_mark(mark: str) -> AfterValidator:
    """A check that a template says where the prompt goes."""

    def check(template: str) -> str:
        if mark not in template:
            raise ValueError(f"given {template!r:.200}, expected {mark} in it, where the task's text goes")
        return template

    return AfterValidator(check)


def check_weights(key: str, names: str | tuple[str, ...], weights: tuple[float, ...]) -> None:
    """Raise ValueError unless there is a weight for each of several rewards, or none at all."""
    if weights and isinstance(names, str):
        raise ValueError(f"reward_weights = {list(weights)} are of a list of rewards, and {key} = {names!r} is none")
    if weights and len(weights) != len(names):
        raise ValueError(f"reward_weights has {len(weights)} weights, and {key} {len(names)} rewards: give one for each")


def whole_algorithm(given: Any) -> Any:
    """An algorithm's table with every default filled in, as the recipe's own `algorithm` is; {} for none."""
    if isinstance(given, dict):
        given = {"name": "grpo", **given} if given else None
    return {} if given is None else dump(build(AlgorithmSettings, {"name": given} if isinstance(given, str) else given))


class OneOf(Config):
    """Settings of an environment that is one of several; unused when it is the only one."""

    name: str = Field(default="", description="Name of the environment among several. A single one has none")
    weight: int = Field(default=1, ge=1, le=HEAVIEST, description="Weight of its groups and held-out tasks")
    algorithm: dict[str, Any] = Field(
        default={}, description="Algorithm of this environment's groups alone: a preset or a table. Empty: the recipe's"
    )

    policy: str = Field(
        default="", description="Policy that plays it, one of the trained ones in `policies`. Empty: the only trained one"
    )

    @field_validator("algorithm", mode="before")
    @classmethod
    def _resolved(cls, given: Any) -> Any:
        return whole_algorithm(given)

    @property
    def own_algorithm(self) -> AlgorithmSettings | None:
        return AlgorithmSettings.model_validate(self.algorithm) if self.algorithm else None


class ReasoningGymSettings(OneOf):
    """A dataset of reasoning-gym, with its own scorer."""

    kind: Literal["reasoning_gym"] = Field(default="reasoning_gym", description=KIND)
    dataset: str = Field(description="Name of the dataset in reasoning-gym, such as spell_backward")
    size: int = Field(default=10000, ge=1, description="Most training tasks. No question comes twice")
    eval_size: int = Field(default=1024, ge=1, description="Held-out tasks")
    seed: int = Field(default=0, description="Seed of the tasks")
    args: dict[str, Any] = Field(default={}, description="Arguments of the dataset, such as min_word_len")
    template: Annotated[str, _with_mark("{question}")] = Field(
        default="{question}", description="Text of the prompt. {question} stands for the question"
    )
    answer_tag: str = Field(default="", description="Tag whose last <TAG>...</TAG> is judged. Empty: the whole reply")
    binary: bool = Field(default=False, description="Give 1 for the full score and 0 for less: partial scores can be gamed")

    @field_validator("args")
    @classmethod
    def _of_dataset(cls, args: dict[str, Any]) -> dict[str, Any]:
        if own := [key for key in ("seed", "size") if key in args]:
            raise ValueError(f"{own[0]} is not an argument of the dataset: give it as env.{own[0]}")
        return args


class RowsSettings(OneOf):
    """A file of rows or a Hugging Face dataset, judged by rewards.

    Without a reward nothing is judged: training then learns from the replies in the rows.
    """

    kind: Literal["rows"] = Field(default="rows", description=KIND)
    data: str = Field(
        description="Rows: a .jsonl file, a dataset's folder, its hub name (org/name or org/name@revision), or FILE.py:TASKS"
    )
    eval_data: str = Field(default="", description="Held-out rows. Empty: eval_share of data, by the prompt's hash")
    eval_share: float = Field(default=0.1, gt=0, lt=1, description=EVAL_SHARE)
    split: str = Field(default="train", description="Split of a Hugging Face dataset that is trained on")
    prompt_column: str = Field(default="prompt", description="Column that holds the prompt")
    answer_column: str = Field(default="answer", description="Column that rewards know as `answer`")
    reward: Names = Field(
        default="",
        description="Reward: exact, regex, numeric, last_boxed, math, code, model, or FILE.py:FUNCTION. "
        "A list: their weighted sum. Empty: nothing judges",
    )
    reward_weights: tuple[FiniteFloat, ...] = Field(default=(), description=WEIGHTS)
    reward_options: dict[str, Any] = Field(
        default={},
        description="Further arguments of the reward, such as a tolerance. Of a list of rewards: tables by their names",
    )
    template: Annotated[str, _with_mark("{prompt}")] = Field(
        default="{prompt}", description="Text of the prompt. {prompt} stands for the row's"
    )

    @model_validator(mode="after")
    def _weighed(self) -> RowsSettings:
        check_weights("reward", self.reward, self.reward_weights)
        if self.reward in NO_REWARD and self.reward_options:
            raise ValueError("reward_options do not apply while reward is empty: name the reward, or leave them out")
        return self


class GuessSettings(OneOf):
    """A multi-turn game: find a number by guesses that are answered "higher" or "lower"."""

    kind: Literal["guess"] = Field(default="guess", description=KIND)
    low: int = Field(default=1, ge=0, description="Least number that may have to be found")
    high: int = Field(default=16, ge=1, description="Greatest number that may have to be found")
    turns: int = Field(default=5, ge=1, description="Guesses allowed in an episode")
    size: int = Field(default=2000, ge=1, description="Most training tasks")
    eval_size: int = Field(default=200, ge=1, description="Most held-out tasks, at most a quarter of all")
    seed: int = Field(default=0, description="Seed of the tasks")

    @model_validator(mode="after")
    def _in_order(self) -> GuessSettings:
        if not self.low < self.high <= self.low + WIDEST:
            raise ValueError(f"low = {self.low}, high = {self.high}: expected low < high, at most {WIDEST} apart")
        return self


class PythonSettings(OneOf):
    """An environment, or a reward function with its tasks, from the user's file."""

    kind: Literal["python"] = Field(default="python", description=KIND)
    path: Names = Field(
        description="Environment or reward: FILE.py:NAME or MODULE:NAME. A list of rewards: their weighted sum"
    )
    reward_weights: tuple[FiniteFloat, ...] = Field(default=(), description=WEIGHTS)
    data: str = Field(default="", description="Rows as tasks. Empty: the environment's own, or `tasks` of its file")
    eval_data: str = Field(default="", description="Held-out rows. Empty: eval_share of data")
    eval_share: float = Field(default=0.1, gt=0, lt=1, description=EVAL_SHARE)

    @model_validator(mode="after")
    def _weighed(self) -> PythonSettings:
        check_weights("path", self.path, self.reward_weights)
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path


class AgentSettings(OneOf):
    """A program that plays by HTTP: it finds the policy at an address that speaks OpenAI's and Anthropic's API."""

    kind: Literal["agent"] = Field(default="agent", description=KIND)
    command: str = Field(description="Command that plays an episode, run without a shell. python: the present interpreter")
    lifetime: Literal["episode", "run"] = Field(
        default="episode",
        description="Life of a process of the command: one episode, or all that its worker plays, several at a time",
    )
    limit_s: FiniteFloat = Field(
        default=300.0, gt=0, description="Seconds that the command may take for an episode. A late one is unscorable"
    )
    data: str = Field(description="Tasks: rows as of kind rows, or FILE.py:NAME, a list of rows or a function of the split")
    eval_data: str = Field(default="", description="Held-out rows. Empty: eval_share of data")
    eval_share: float = Field(default=0.1, gt=0, lt=1, description=EVAL_SHARE)
    reward: Names = Field(default="", description="Reward, as of kind rows. Empty: the command itself tells the score")
    reward_weights: tuple[FiniteFloat, ...] = Field(default=(), description=WEIGHTS)
    reward_options: dict[str, Any] = Field(default={}, description="Further arguments of the reward, as of kind rows")

    @model_validator(mode="after")
    def _weighed(self) -> AgentSettings:
        check_weights("reward", self.reward, self.reward_weights)
        return self


class EnvironmentWorkers(Config):
    """Worker processes that play the episodes of a user's environment."""

    workers: int | None = Field(
        default=None,
        ge=0,
        description="Worker processes that play. 0: the controller plays, for breakpoint(). "
        "none: 2 for a user's environment, 0 for a built-in one",
    )
    memory_mb: int = Field(default=0, ge=0, description="Address space of a worker in MB. 0: unlimited")
    limit_s: float = Field(default=10.0, gt=0, description="Seconds that a call may block before its worker is killed")


WORKERS = 2  # default for a user's environment


class ScoringSettings(Config):
    """Worker processes that judge attempts, with their limits."""

    workers: int = Field(default=2, ge=0, description="Worker processes that judge. 0: the controller, for breakpoint()")
    limit_s: float = Field(default=10.0, gt=0, description="Seconds that one call may take before its worker is killed")
    memory_mb: int = Field(default=0, ge=0, description="Address space of a worker in MB. 0: unlimited")
    max_error_share: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Share of infrastructure errors among the latest outcomes, above which admission pauses",
    )
    pause_s: float = Field(default=600.0, gt=0, description="Seconds that admission may pause before the run ends")
    accept: tuple[Literal["gold", "garbage"], ...] = Field(
        default=(), description="Failed checks of the reward that are accepted: gold replies that fail, garbage that passes"
    )

    def workers_as(self) -> dict[str, Any]:
        """The arguments of `RewardPool`."""
        return self.model_dump(include={"workers", "limit_s", "memory_mb"})


AnyEnv = ReasoningGymSettings | RowsSettings | GuessSettings | PythonSettings | AgentSettings
RESERVED = ("mean",)  # reward/mean is the metric over all environments
KINDS = {kind.model_fields["kind"].default: kind for kind in get_args(AnyEnv)}


def parse_env(value: Any) -> Any:
    """Expand a short form to its table; check `kind` and names. Raises ValueError in one sentence."""
    if isinstance(value, list | tuple):
        if value and all(isinstance(each, str) and ".py:" in each for each in value):
            raise ValueError(
                f"a list of names, {value[0]!r} first: several environments are a list of tables, each with a name; several "
                'rewards of one environment are {kind = "python", path = [...], reward_weights = [...]}'
            )
        return _several([_one(each) for each in value])
    value = _one(value)
    given = value if isinstance(value, Mapping) else {}
    of_several = {key: field.default for key, field in OneOf.model_fields.items() if key != "policy"}
    if idle := [key for key, default in of_several.items() if given.get(key, default) != default]:
        raise ValueError(
            f"{idle[0]} = {given[idle[0]]!r} belongs to one of several environments: give env as a list of tables"
        )
    return value


def _several(entries: list[Any]) -> list[Any]:
    names = [each.get("name", "") if isinstance(each, Mapping) else getattr(each, "name", "") for each in entries]
    if len(entries) < 2:
        raise ValueError(f"a list of {len(entries)} environments: expected two or more; one alone is given as its table")
    if bad := [name for name in names if not re.fullmatch(r"[\w-]+", str(name)) or name in RESERVED]:
        raise ValueError(
            f"one of several environments has the name {bad[0]!r}: expected letters, digits, _ and - in each table's name"
            + (f", and not {' or '.join(RESERVED)}" if bad[0] in RESERVED else "")
        )
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two environments have the name {twice[0]!r}: expected a name of its own for each")
    return entries


def _one(value: Any) -> Any:
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
    if text in KINDS:  # a kind that needs values without a default
        needs = [name for name, field in KINDS[text].model_fields.items() if field.is_required()]
        table = ", ".join([f'kind = "{text}"', *(f"{name} = ..." for name in needs)])
        raise ValueError(f"environment {text!r} needs {' and '.join(needs)}: expected {{{table}}}")
    raise ValueError(f"unknown environment {text!r}{_near(kind)}: expected guess, reasoning_gym:DATASET or FILE.py:NAME")


def _near(name: str) -> str:
    near = difflib.get_close_matches(name, KINDS, n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def environments_of(env: AnyEnv | tuple[AnyEnv, ...]) -> tuple[AnyEnv, ...]:
    """The environments of a recipe as a tuple, one or several."""
    return env if isinstance(env, tuple) else (env,)


def workers_of(env: AnyEnv, settings: EnvironmentWorkers) -> int:
    """The worker processes that play an environment, as far as its settings tell: see `episode_workers.in_workers`."""
    match env:
        case AgentSettings():
            return WORKERS if settings.workers is None else settings.workers
        case RowsSettings() | ReasoningGymSettings():  # a reply each
            return 0
        case PythonSettings() if len(env.paths) > 1:  # rewards
            return 0
        case _:  # a built-in one needs none; a user's file may hold a reward as well
            return settings.workers or 0


SEVERAL, ALONE = "several", "alone"
_One = Annotated[AnyEnv, Field(discriminator="kind")]
EnvSettings = Annotated[
    Annotated[_One, Tag(ALONE)] | Annotated[tuple[_One, ...], Tag(SEVERAL)],
    Discriminator(lambda given: SEVERAL if isinstance(given, list | tuple) else ALONE),
    BeforeValidator(parse_env),
]
