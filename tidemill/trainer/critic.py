"""Critic: estimates the value before each token, trained beside the policy by its own optimizer.

It is a model of its own or a head on the policy's decoder. With a head, the value loss reaches the policy's weights too, so
its weight in the loss matters. Gradients of critic and policy are clipped separately: a critic that is far off must not
shorten the policy's step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tidemill.core.errors import TrainingDiverged
from tidemill.core.types import Metrics
from tidemill.models.decoder import Decoder
from tidemill.models.value_model import ValueModel
from tidemill.trainer.optimizer import Optimizer
from tidemill.trainer.trainer_settings import TrainerSettings

_PREFIX = "critic."  # prefix of its tensors in a checkpoint


class Critic:
    """A value model with its optimizer, clipped apart from the policy."""

    def __init__(self, model: ValueModel, settings: TrainerSettings, updates: int) -> None:
        self.model = model
        self._weights = dict(model.trained.named_parameters())
        self._optimizer = Optimizer(model.trained, settings, updates)

    def beside(self, policy: Decoder) -> Critic:
        """Move the critic to the policy's device. Raises ValueError when the vocabularies differ."""
        if self.model.decoder.arch.vocab != policy.arch.vocab:
            raise ValueError(
                f"the critic has a vocabulary of {self.model.decoder.arch.vocab} tokens, the policy one of "
                f"{policy.arch.vocab}: it cannot read the policy's answers; give a model with the same tokenizer"
            )
        self.model.to(policy.embed.weight.device)
        return self

    def check(self, scale: float) -> None:
        """Raise TrainingDiverged when the critic's gradient is not finite; call before the policy's step."""
        try:
            self._optimizer.norm(scale)
        except TrainingDiverged as error:
            raise TrainingDiverged(f"of the critic, {error}") from None

    def apply(self, scale: float) -> Metrics:
        """Take one step. Raises TrainingDiverged, and takes none, when the gradient is not finite."""
        return {f"critic/{name}": value for name, value in self._optimizer.apply(scale).items()}

    def forget(self) -> None:
        self._optimizer.forget()

    def state(self) -> dict[str, Tensor]:
        """Tensors for a checkpoint, by name: weights, and both moments after the first update."""
        return {_PREFIX + name: tensor.detach() for name, tensor in (self._weights | self._optimizer.state()).items()}

    def expected(self, updates: int) -> dict[str, Tensor]:
        """Names of `state()` after `updates` updates, each with a tensor of its shape and dtype."""
        return {_PREFIX + name: tensor for name, tensor in (self._weights | self._optimizer.expected(updates)).items()}

    @torch.no_grad()
    def restore(self, state: dict[str, Tensor], updates: int) -> None:
        """Restore weights and moments from a checked `state`."""
        own = {name.removeprefix(_PREFIX): tensor for name, tensor in state.items()}
        for name, weight in self._weights.items():
            weight.copy_(own[name])
        self._optimizer.restore(own, updates)
