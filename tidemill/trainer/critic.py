"""What an answer is worth before each of its tokens, trained in the same passes as the policy, by an optimizer of its own.

A model of its own, or a head on the policy's decoder: then the value loss reaches the policy's weights too, and its weight
in the loss matters. Gradients are clipped apart: a critic that is far off must not shorten the policy's step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tidemill.core.interfaces import TrainingDiverged
from tidemill.core.types import Metrics
from tidemill.models.decoder import Decoder
from tidemill.models.value_model import ValueModel
from tidemill.trainer.optimizer import Optimizer
from tidemill.trainer.trainer_settings import TrainerSettings

_PREFIX = "critic."  # of its tensors in a checkpoint


class Critic:
    def __init__(self, model: ValueModel, settings: TrainerSettings, updates: int) -> None:
        self.model = model
        self._weights = dict(model.trained.named_parameters())
        self._optimizer = Optimizer(model.trained, settings, updates)

    def beside(self, policy: Decoder) -> Critic:
        """The same, on the policy's device. Raises ValueError when it reads other tokens."""
        if self.model.decoder.arch.vocab != policy.arch.vocab:
            raise ValueError(
                f"the critic has a vocabulary of {self.model.decoder.arch.vocab} tokens, the policy one of "
                f"{policy.arch.vocab}: it cannot read the policy's answers; give a model with the same tokenizer"
            )
        self.model.to(policy.embed.weight.device)
        return self

    def check(self, scale: float) -> None:
        """Raises TrainingDiverged when its gradient is not finite: before the policy takes a step without it."""
        try:
            self._optimizer.norm(scale)
        except TrainingDiverged as error:
            raise TrainingDiverged(f"of the critic, {error}") from None

    def apply(self, scale: float) -> Metrics:
        """Raises TrainingDiverged, and takes no step, when its gradient is not finite."""
        return {f"critic/{name}": value for name, value in self._optimizer.apply(scale).items()}

    def forget(self) -> None:
        self._optimizer.forget()

    def state(self) -> dict[str, Tensor]:
        """By name, what a checkpoint must hold: its weights, and their moments after the first update."""
        return {_PREFIX + name: tensor.detach() for name, tensor in (self._weights | self._optimizer.state()).items()}

    def expected(self, updates: int) -> dict[str, Tensor]:
        """Names of `state()` after so many, each with a tensor of its shape and dtype."""
        return {_PREFIX + name: tensor for name, tensor in (self._weights | self._optimizer.expected(updates)).items()}

    @torch.no_grad()
    def restore(self, state: dict[str, Tensor], updates: int) -> None:
        """Take over checked `state`."""
        own = {name.removeprefix(_PREFIX): tensor for name, tensor in state.items()}
        for name, weight in self._weights.items():
            weight.copy_(own[name])
        self._optimizer.restore(own, updates)
