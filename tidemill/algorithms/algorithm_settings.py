"""Settings of the algorithm: a preset's name, and the values that differ from it.

`algorithm = "grpo"` and `algorithm = { name = "grpo", clip_high = 0.28 }` are both accepted. A preset consists of names
and values only (see `presets`), so a resolved configuration holds every value in force. A setting that does not apply to
the chosen functions is an error, because it would be ignored. This module does not import torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from pydantic import Field, model_validator

from tidemill.algorithms.advantages import ACROSS_SEATS, ADVANTAGES, COMPARING, NEEDS, USING_GIVEN
from tidemill.algorithms.corrections import CORRECTIONS
from tidemill.algorithms.preferences import EVERY_PREFERENCE, OF_SCORES, PREFERENCES
from tidemill.algorithms.presets import LOSS_CONSTANTS, PRESETS
from tidemill.algorithms.validation import Constants, check_applicable, expect_constants, expect_name
from tidemill.core.config import Config
from tidemill.core.import_object import constants_of
from tidemill.core.types import LossSpec

Part = Literal["loss", "advantage", "preference"]
T = TypeVar("T")


class CorrectionSettings(Config):
    """A correction for sampling from another policy: `"tis"`, or `{ name = "tis", cap = 4 }`."""

    name: str = Field(description="Name of the correction, or FILE.py:function")
    constants: dict[str, float] = Field(
        default={}, description="Constants of the correction. They may stand beside its name"
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        if isinstance(given, str):
            given = {"name": given}
        return _gathered(given, cls) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _known(self) -> CorrectionSettings:
        if ".py:" not in self.name:
            expect_name("correction", self.name, CORRECTIONS)
            expect_constants(self.constants, {f"the correction {self.name!r}": constants_of(CORRECTIONS[self.name])})
        return self


class ReferenceSettings(Config):
    """A second policy and its use: `"initial"`, a model folder, or a table."""

    model: str = Field(default="initial", description="Folder of its weights. initial: those that the run began with")
    every: int = Field(default=0, ge=0, description="Updates between copies of the policy into the reference. 0: never")
    decay: float = Field(default=0.0, ge=0, lt=1, description="Share of the old reference that each copy keeps")
    kl: float = Field(default=0.0, ge=0, description="Coefficient of the KL divergence from the reference. 0: off")
    estimator: Literal["k1", "k2", "k3"] | None = Field(
        default=None, description="Estimator of the KL divergence. none: k3 in a loss, k1 in a reward"
    )
    into: Literal["loss", "reward"] = Field(
        default="loss", description="Place of the KL divergence: a term of the loss, or a penalty in the reward"
    )
    distil: float = Field(
        default=0.0, ge=0, description="Coefficient of log(reference / policy) as a reward of each token. 0: off"
    )

    @model_validator(mode="after")
    def _consistent(self) -> ReferenceSettings:
        if not self.kl and (self.estimator or self.into != "loss"):
            raise ValueError("estimator and into do not apply while kl = 0")
        if self.into == "reward" and self.estimator not in (None, "k1"):
            raise ValueError(f"estimator = {self.estimator!r} does not go with into = 'reward', which takes k1 off")
        if self.decay and not self.every:
            raise ValueError("decay does not apply while every = 0: the reference never moves")
        if self.distil and self.model == "initial" and not self.every:
            raise ValueError("distil from the initial policy teaches nothing: set model to a teacher's folder, or every")
        return self


class CriticSettings(Config):
    """The critic, which predicts returns: `"initial"`, `"policy"`, a model folder, or a table."""

    model: str = Field(
        default="initial",
        description="Folder to start from. initial: the policy's model; policy: a head on the policy's own decoder",
    )
    lr: float | None = Field(default=None, gt=0, description="Learning rate of the critic. none: the trainer's")
    weight: float = Field(default=0.5, gt=0, description="Weight of the critic's loss beside the policy's")
    clip: float = Field(default=0.0, ge=0, description="Largest change of a value in a step (loss `value`). 0: no limit")
    lam: float = Field(default=1.0, ge=0, le=1, description="Lambda of the returns that the critic is trained towards")
    warmup: int = Field(default=0, ge=0, description="First steps, in which only the critic is trained. 0: none")


def begins_as(companion: ReferenceSettings | CriticSettings | None, initial: T, named: Callable[[str], T]) -> T | None:
    """The first weights of a reference or critic: `initial` or `named(folder)`.

    None if it is not configured, or if the critic is a head on the policy's own decoder.
    """
    if companion is None or (isinstance(companion, CriticSettings) and companion.model == "policy"):
        return None
    return initial if companion.model == "initial" else named(companion.model)


class OverlongSettings(Config):
    """Treatment of attempts that were cut off: `"mask"`, or `{ treat = "penalty", cache = 64 }`."""

    treat: Literal["keep", "filter", "mask", "penalty"] = Field(
        default="keep",
        description="Treatment of attempts that were cut off. filter: left out; mask: no gradient; penalty: less reward",
    )
    cache: int | None = Field(
        default=None, ge=1, description="Tokens before the limit over which the penalty grows. none: a fifth of the limit"
    )

    @model_validator(mode="after")
    def _consistent(self) -> OverlongSettings:
        if self.cache is not None and self.treat != "penalty":
            raise ValueError(f"cache does not apply to treat = {self.treat!r}: it belongs to 'penalty'")
        return self


def adaptive_entropy(coefficient: float, measured: float, *, target: float, change: float = 0.005) -> float:
    """The next step's c: c + change where the entropy is below target, else max(0, c - change).

    In its own step, c is the weight of the term `entropy` if the entropy is at most target; above it, the weight is 0.

    Source: adaptive entropy control, Skywork-OR1, 2505.22312, from c = 0 with target 0.2 and change 0.005; it states no
    bound at 0. The measured entropy is the mean of -log mu over the sampled tokens of the step, known before its
    gradient: an unbiased estimate of the entropy of the sampled distribution.
    When: exploration is not to end, and no constant weight is right from the first step to the last.
    Cost: nothing.
    """
    return max(0.0, coefficient + (change if measured < target else -change))


class EntropySettings(Config):
    """The entropy's weight in the loss: `0.01`, or following `{ target = 0.2 }`."""

    coefficient: float = Field(
        default=0.0,
        description="Weight of the entropy bonus, or of a penalty if below 0. With a target: that of the first step",
    )
    target: float | None = Field(default=None, gt=0, description="Least entropy in nats a token. none: a constant weight")
    change: float | None = Field(default=None, gt=0, description="Change of the weight in each step. none: 0.005")

    @model_validator(mode="after")
    def _consistent(self) -> EntropySettings:
        if self.target is None and self.change is not None:
            raise ValueError("change does not apply without a target: the weight is constant")
        if self.target is not None and self.coefficient < 0:
            raise ValueError(f"coefficient = {self.coefficient:g} with a target: a weight that follows it is never below 0")
        return self

    def next(self, coefficient: float, measured: float) -> float:
        """The weight for the next step, after a step with this weight and this measured entropy."""
        assert self.target is not None
        given = {} if self.change is None else {"change": self.change}
        return adaptive_entropy(coefficient, measured, target=self.target, **given)


class UpdateSettings(Config):
    """The number of optimizer updates in a step."""

    minibatches: int = Field(default=1, ge=1, description="Parts of a step's groups, each with an update of its own")
    epochs: int = Field(default=1, ge=1, description="Passes over a step's groups")

    @property
    def count(self) -> int:
        return self.minibatches * self.epochs


class AlgorithmSettings(Config):
    """The algorithm in force: a preset's name, and every value that it chose or that was given."""

    name: str = Field(description="Preset that the other values start from")
    advantage: str = Field(description="Advantage by its name, or FILE.py:function")
    loss: str = Field(description="Loss by its name, or FILE.py:function")
    reduction: Literal["token", "sequence", "prompt", "attempt", "fixed"] = Field(
        description="Unit whose token terms are averaged: all tokens, each sequence, prompt, attempt, or a fixed length"
    )
    given: Literal["", "answers", "pairs", "labels"] = Field(
        default="", description="Replies that the tasks hold and that are learnt. Empty: sampled replies are learnt"
    )
    constants: Constants = Field(
        default={}, description="Constants of loss and advantage. They may also be given beside the other keys"
    )
    preference: str = Field(
        default="",
        description="Preference by its name: it pairs the best and worst attempt, and replaces the advantage. Empty: none",
    )
    corrections: tuple[CorrectionSettings, ...] = ()
    old_logprobs: Literal["behaviour", "recompute"] = Field(
        default="behaviour", description="Logprobs of the old policy: the engine's, or the trainer's own"
    )
    updates: UpdateSettings = UpdateSettings()
    zero_variance: Literal["drop", "keep"] = Field(
        default="keep", description="Treatment of groups whose rewards are all equal. Kept ones only dilute the mean"
    )
    overlong: OverlongSettings = OverlongSettings()
    fixed_length: int | None = Field(
        default=None,
        ge=1,
        description="Tokens by which the reduction `fixed` divides. none: the longest completion that may be sampled",
    )
    reference: ReferenceSettings | None = None
    critic: CriticSettings | None = None
    entropy: EntropySettings = EntropySettings()

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> AlgorithmSettings:
        return cls.model_validate({"name": name, **overrides})

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, given: Any) -> Any:
        if isinstance(given, str):
            given = {"name": given}
        if not isinstance(given, dict):
            return given
        if given.get("name") is None:
            raise ValueError(f"name the preset to start from: one of {', '.join(PRESETS)}")
        name = str(given["name"])
        if name not in PRESETS:
            near = difflib.get_close_matches(name, PRESETS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(PRESETS)}"
            raise ValueError(f"unknown algorithm {name!r}; {hint}")
        if isinstance(each := given.get("corrections"), str | dict):
            given = {**given, "corrections": [each]}
        short = {"reference": "model", "critic": "model", "overlong": "treat"}
        given = {key: {short[key]: each} if key in short and isinstance(each, str) else each for key, each in given.items()}
        if isinstance(weight := given.get("entropy"), int | float) and not isinstance(weight, bool):
            given = {**given, "entropy": {"coefficient": weight}}
        return _with_defaults(_gathered({key: value for key, value in given.items() if value is not None}, cls))

    @model_validator(mode="after")
    def _applicable(self) -> AlgorithmSettings:
        check_applicable(self)
        return self

    @property
    def distils(self) -> bool:
        return self.reference is not None and self.reference.distil > 0

    @property
    def kl_in_reward(self) -> float:
        """The coefficient of the KL penalty in the reward; 0 if there is none."""
        return self.reference.kl if self.reference is not None and self.reference.into == "reward" else 0.0

    @property
    def tells_tokens_apart(self) -> bool:
        """True if the tokens of one attempt may have different advantages."""
        given = self.advantage in USING_GIVEN and bool(self.kl_in_reward)
        return given or self.advantage in ("process", "turn_level", "gae") or self.constants.get("gamma", 1.0) != 1.0

    @property
    def compares(self) -> bool:
        """True if attempts are compared, so that equal rewards train nothing."""
        drops = ".py:" in self.advantage and self.zero_variance == "drop"  # so the user's function compares
        alone = self.preference in PREFERENCES or self.advantage in COMPARING | ACROSS_SEATS or drops
        return alone and not self.distils and not self.kl_in_reward

    @property
    def scores(self) -> bool:
        """True if the model in training judges replies (a reward model) instead of writing them."""
        return self.preference in OF_SCORES

    @property
    def recomputes(self) -> bool:
        return self.old_logprobs == "recompute"

    @property
    def wants_greedy(self) -> bool:
        """True if the advantage needs a greedy attempt at each task."""
        return NEEDS.get(self.advantage) == "greedy"

    @property
    def reads_lags(self) -> bool:
        """True if the loss reads the age of each token's weights."""
        return self.loss == "a3po" or ".py:" in self.loss

    def loss_spec(self, entropy: float | None = None) -> LossSpec:
        """The loss with its further terms. entropy: its weight in this step; None is the first step's."""
        also = []
        if (r := self.reference) is not None and r.kl and r.into == "loss":
            also.append(LossSpec(f"kl_{r.estimator or 'k3'}", {"importance": 1.0}, weight=r.kl))
        if (critic := self.critic) is not None and not self.scores:
            also.append(LossSpec("value", {"clip": critic.clip}, weight=critic.weight))
        if weight := self.entropy.coefficient if entropy is None else entropy:
            also.append(LossSpec("entropy", weight=weight))
        numbers = {name: float(value) for name, value in self.constants_for("loss").items()}
        return LossSpec(self.loss, numbers, also=tuple(also))

    def constants_for(self, part: Part) -> Constants:
        """The constants that one part takes; a user's own function gets those that no other part takes."""
        takes: dict[Part, Constants | None] = {
            "loss": LOSS_CONSTANTS.get(self.loss),
            "advantage": _taken(ADVANTAGES, self.advantage),
            "preference": _taken(EVERY_PREFERENCE, self.preference),
        }
        if (own := takes[part]) is not None:
            return {name: value for name, value in self.constants.items() if name in own}
        others = {name for names in takes.values() if names is not None for name in names}
        return {name: value for name, value in self.constants.items() if name not in others}

    def check(self, groups: int, group_size: int) -> None:
        """Raise ValueError when steps of so many groups of this size could not be trained."""
        if (parts := self.updates.minibatches) > groups:
            raise ValueError(f"updates.minibatches = {parts} of {groups} groups a step: no group is divided")
        if self.given == "labels" and groups < 2:
            raise ValueError(
                "kto with 1 group a step: its baseline is of replies after another's prompt; give at least 2 groups"
            )
        if group_size < 2 and (self.preference in PREFERENCES or self.advantage in COMPARING):
            what = f"preference {self.preference!r}" if self.preference else f"advantage {self.advantage!r}"
            raise ValueError(
                f"group size {group_size} with {what}, which compares the siblings of a prompt: "
                "every advantage would be 0; use at least 2 samples a prompt"
            )
        least = self.constants.get("k", 0) + (self.advantage == "pass_at_k")  # the best of all attempts is the same for all
        if least > group_size:
            raise ValueError(
                f"k = {self.constants['k']:g} with groups of {group_size}: give rollout.group_size >= {least:g}"
            )

    def with_longest(self, max_tokens: int) -> AlgorithmSettings:
        """A copy in which values that depend on the longest completion are filled in."""
        filled: dict[str, Any] = {}
        if self.reduction == "fixed" and self.fixed_length is None:
            filled["fixed_length"] = max_tokens
        if self.overlong.treat == "penalty" and self.overlong.cache is None:
            fifth = max(1, max_tokens // 5)  # DAPO's share: 4096 of 20480
            filled["overlong"] = self.overlong.model_copy(update={"cache": fifth})
        return self.model_copy(update=filled)


def _gathered(given: dict[str, Any], kind: type[Config]) -> dict[str, Any]:
    """The settings with all keys that are no setting moved into `constants`."""
    known, constants = dict[str, Any](), given.get("constants", {})
    if not isinstance(constants, dict):
        return given
    names = kind.model_fields
    for key, value in given.items():
        is_constant = key not in names and isinstance(value, int | float | dict) and not isinstance(value, bool)
        if is_constant and (key in EVERY_CONSTANT or not difflib.get_close_matches(key, names, n=1, cutoff=0.75)):
            constants = {**constants, key: value}
        else:
            known[key] = value  # a setting; or refused, with what it was perhaps meant to be
    return known | {"constants": constants}


_FUNCTIONS = [*ADVANTAGES.values(), *EVERY_PREFERENCE.values(), *CORRECTIONS.values()]
EVERY_CONSTANT = {name for own in (*LOSS_CONSTANTS.values(), *map(constants_of, _FUNCTIONS)) for name in own}


def _with_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """The given values over the preset's over the chosen functions' defaults."""
    preset = PRESETS[given["name"]]
    names = [given.get(key, "") for key in ("loss", "advantage", "preference")]
    if not all(isinstance(name, str) for name in names) or not isinstance(given["constants"], dict):
        return {**preset, **given}  # validation will refuse it
    chosen = {"preference": "", **preset, **given}
    own: Constants = dict(LOSS_CONSTANTS.get(chosen["loss"], {}))
    table, name = (EVERY_PREFERENCE, chosen["preference"]) if chosen["preference"] else (ADVANTAGES, chosen["advantage"])
    own |= {key: value for key, value in (_taken(table, name) or {}).items() if value is not None}
    # constants of the preset's functions go with them when one is replaced
    changed = any(chosen.get(key) != preset.get(key, "") for key in ("loss", "advantage", "preference"))
    kept = {k: v for k, v in preset.get("constants", {}).items() if k in own or not changed}
    for table_of in ("reference", "critic"):
        if isinstance(given.get(table_of), dict):
            given = {**given, table_of: {**preset.get(table_of, {}), **given[table_of]}}
    return {**preset, **given, "constants": {**own, **kept, **given["constants"]}}


def _taken(table: dict[str, Any], name: str) -> Constants | None:
    return constants_of(table[name]) if name in table else None
