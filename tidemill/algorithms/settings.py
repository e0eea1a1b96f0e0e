"""Which gradient: a preset's name, and what is to differ from it. No torch here.

`algorithm = "grpo"` and `algorithm = { name = "grpo", clip_high = 0.28 }` are both accepted. A preset is nothing but values:
what is read back from a resolved configuration is every value in force, and None where a constant does not apply to the
chosen loss. A constant that does not apply is an error, because it would be ignored.
"""

from __future__ import annotations

import difflib
from typing import Any, Literal

from pydantic import Field, model_validator

from tidemill.config import Config
from tidemill.types import LossSpec

LOSS_CONSTANTS: dict[str, dict[str, float]] = {
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0, "tis_cap": 0.0},
    "aipo": {"cap": 5.0},
}
CONSTANTS = tuple(name for constants in LOSS_CONSTANTS.values() for name in constants)

PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, 2402.03300 (without its KL term): the mean over samples of their token means
    "grpo": {"advantage": "grpo", "loss": "ppo_clip", "reduction": "sequence"},
    # 2503.20783: no division by the spread and by a constant length only; fixed_length is the longest completion
    "dr_grpo": {"advantage": "dr_grpo", "loss": "ppo_clip", "reduction": "fixed"},
    # 2402.14740: leave-one-out baseline; per-token clip and batch token mean
    "rloo": {"advantage": "rloo", "loss": "ppo_clip", "reduction": "token"},
    # LlamaRL, 2505.24034: made for asynchronous training, corrects for the sampling policy and drops nothing
    "aipo": {"advantage": "dr_grpo", "loss": "aipo", "reduction": "token"},
    # 2503.14476: clip-higher, dynamic sampling, token mean as in the authors' code (the paper prints the prompt mean)
    "dapo": {"advantage": "grpo", "loss": "ppo_clip", "reduction": "token", "clip_high": 0.28, "zero_variance": "drop"},
}


class AlgorithmSettings(Config):
    name: str  # the preset that the other values came from
    advantage: Literal["grpo", "dr_grpo", "rloo"]
    loss: str  # "ppo_clip", "aipo" or FILE.py:function
    reduction: Literal["token", "sequence", "prompt", "fixed"]
    clip_low: float | None = Field(default=None, ge=0)
    clip_high: float | None = Field(default=None, ge=0)
    dual_clip: float | None = Field(default=None, ge=0)  # 0: off; else > 1
    cap: float | None = Field(default=None, gt=0)
    tis_cap: float | None = Field(default=None, ge=0)  # 0: off
    old_logprobs: Literal["behaviour", "recompute"] = "behaviour"  # p_hat: the engine's logprobs, or the trainer's own
    zero_variance: Literal["drop", "keep"] = "keep"  # groups whose rewards are all equal: they only dilute the mean
    fixed_length: int | None = Field(default=None, ge=1)  # tokens; None: the longest completion that may be sampled

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
        name = given.get("name")
        if name is None:
            raise ValueError(f"name the preset to start from: one of {', '.join(PRESETS)}")
        if str(name) not in PRESETS:
            near = difflib.get_close_matches(str(name), PRESETS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(PRESETS)}"
            raise ValueError(f"unknown algorithm {name!r}; {hint}")
        return _with_defaults({key: value for key, value in given.items() if value is not None})

    @model_validator(mode="after")
    def _applicable(self) -> AlgorithmSettings:
        if self.loss not in LOSS_CONSTANTS and ".py:" not in self.loss:
            raise ValueError(f"loss {self.loss!r}: expected {', '.join(LOSS_CONSTANTS)} or FILE.py:function")
        if (accepted := LOSS_CONSTANTS.get(self.loss)) is not None:
            for name in sorted(set(self._constants()) - set(accepted)):
                raise ValueError(f"{name} does not apply to the loss {self.loss!r}, which takes {', '.join(accepted)}")
        if self.dual_clip is not None and 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip = {self.dual_clip}: expected 0 (off) or a number > 1")
        if self.fixed_length is not None and self.reduction != "fixed":
            raise ValueError(f"fixed_length does not apply to the reduction {self.reduction!r}: it belongs to 'fixed'")
        if self.tis_cap and self.old_logprobs == "behaviour":
            raise ValueError("tis_cap corrects for p_hat / mu, which is 1 unless old_logprobs = 'recompute': set that too")
        if self.loss == "aipo" and self.old_logprobs == "recompute":
            raise ValueError(
                "old_logprobs = 'recompute' does not apply to the loss 'aipo', which compares with the sampler only"
            )
        return self

    def _constants(self) -> dict[str, float]:
        values: dict[str, float | None] = {name: self.__dict__[name] for name in CONSTANTS}
        return {name: value for name, value in values.items() if value is not None}

    def loss_spec(self) -> LossSpec:
        return LossSpec(self.loss, self._constants())

    def needs_groups(self) -> bool:
        """Whether an advantage compares siblings, so that a group of one would train nothing."""
        return True  # so do all advantages there are; a value baseline or a batch-wise one would not

    def check(self, group_size: int) -> None:
        """Raise ValueError when groups of this size would carry no gradient."""
        if self.needs_groups() and group_size < 2:
            raise ValueError(
                f"group size {group_size} with advantage {self.advantage!r}, which compares the siblings of a prompt: "
                "every advantage would be 0; use at least 2 samples a prompt"
            )

    def with_fixed_length(self, max_tokens: int) -> AlgorithmSettings:
        """The same, with the length of reduction 'fixed' filled in where it was left open."""
        if self.reduction != "fixed" or self.fixed_length is not None:
            return self
        return self.model_copy(update={"fixed_length": max_tokens})


def _with_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """What was given, over the preset's values, over the chosen loss's own. The constants of a loss that was exchanged for
    another one go with it."""
    preset = PRESETS[given["name"]]
    loss = given.get("loss", preset["loss"])
    if loss != preset["loss"]:
        preset = {key: value for key, value in preset.items() if key not in CONSTANTS}
    return {**LOSS_CONSTANTS.get(loss, {}), **preset, **given}
