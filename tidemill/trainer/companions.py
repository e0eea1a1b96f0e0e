"""Companions of the trained policy: a critic, and a reference policy.

The reference is the anchor of a KL divergence, or a teacher. Beside an adapter it is the policy without that.
The critic estimates the value before each token. It is a model of its own or a head on the policy's decoder. Beside a
policy's adapter, a model of its own has an adapter, too, and all of its head is trained. The loss of a head reaches the
policy's weights too, so its weight matters. Gradients of critic and policy are clipped separately: a critic that is far off
must not shorten the policy's step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from tidemill.core.errors import TrainingDiverged
from tidemill.core.types import Metrics
from tidemill.models.decoder import Decoder
from tidemill.models.local_shards import block_of, local
from tidemill.models.lora import has_adapter, without
from tidemill.models.value_model import ValueModel
from tidemill.models.weight_slices import Slice
from tidemill.trainer.optimizer import Optimizer
from tidemill.trainer.trainer_kinds import AdamWSettings

_CRITIC, _REFERENCE = "critic.", "reference."  # prefixes of their tensors in a checkpoint


class Critic:
    """A value model with its optimizer, clipped apart from the policy."""

    def __init__(self, model: ValueModel, settings: AdamWSettings, updates: int) -> None:
        self.model, self._settings, self._updates = model, settings, updates

    @cached_property
    def _optimizer(self) -> Optimizer:  # made when the model lies where it is trained
        return Optimizer(self.model.trained, self._settings, self._updates)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters, by their names in a checkpoint."""
        return {_CRITIC + name: parameter for name, parameter in self._optimizer.named.items()}

    @property
    def modules(self) -> list[nn.Module]:
        """The modules with weights that are not the policy's."""
        return [self.model.head] if self.model.shared else [self.model.decoder, self.model.head]

    @property
    def adapted(self) -> Decoder | None:
        """Its own decoder, if only an adapter of it is trained."""
        return None if self.model.shared or not has_adapter(self.model.decoder) else self.model.decoder

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
        return {f"critic/{name}": value for name, value in self._optimizer.apply(scale).items()}

    def forget(self) -> None:
        self._optimizer.forget()

    def leave(self, device: torch.device) -> None:
        self._optimizer.leave(device)

    def come_back(self) -> None:
        self._optimizer.come_back()

    def state(self) -> list[Slice]:
        """Blocks for a checkpoint: weights, and both moments after the first update."""
        return _prefixed(_CRITIC, [*self._weights(), *self._optimizer.state()])

    def expected(self, updates: int) -> list[Slice]:
        return _prefixed(_CRITIC, [*self._weights(), *self._optimizer.expected(updates)])

    def _weights(self) -> list[Slice]:
        return [block_of(name, weight) for name, weight in self._optimizer.named.items()]

    @torch.no_grad()
    def restore(self, state: dict[str, Tensor], updates: int) -> None:
        own = {name.removeprefix(_CRITIC): tensor for name, tensor in state.items()}
        for block in self._weights():
            block.tensor.copy_(own[block.name])
        self._optimizer.restore(own, updates)


@dataclass(slots=True)
class Reference:
    """A frozen decoder, or one that follows the policy."""

    decoder: Decoder
    every: int = 0  # updates after which it becomes decay * itself + (1 - decay) * the policy; 0: never
    decay: float = 0.0
    without_adapter: bool = False  # it is the policy itself, as it is without its adapter

    @property
    def modules(self) -> list[nn.Module]:
        return [] if self.without_adapter else [self.decoder]

    def computing(self) -> AbstractContextManager[None]:
        """Context in which `decoder` computes as the reference."""
        return without(self.decoder) if self.without_adapter else nullcontext()

    def beside(self, policy: Decoder) -> Reference:
        """Move the reference to the policy's device. ValueError unless it fits the policy."""
        if self.without_adapter:
            return self
        if self.decoder.arch.vocab != policy.arch.vocab:
            raise ValueError(
                f"the reference policy has a vocabulary of {self.decoder.arch.vocab} tokens, the policy one of "
                f"{policy.arch.vocab}: their logprobs cannot be compared; give a model with the same tokenizer"
            )
        if self.every and self.decoder.arch != policy.arch:
            raise ValueError("a reference policy of another architecture cannot follow the policy: set reference.every = 0")
        self.decoder = self.decoder.to(policy.embed.weight.device).requires_grad_(False)
        return self

    @torch.no_grad()
    def follow(self, policy: Decoder, updates: int) -> None:
        if self.every and updates % self.every == 0:
            for own, other in zip(self.decoder.parameters(), policy.parameters(), strict=True):
                local(own).lerp_(local(other), 1 - self.decay)

    def state(self) -> list[Slice]:
        """Blocks for a checkpoint; none for a reference that never moves."""
        named = self.decoder.named_parameters() if self.every else ()
        return _prefixed(_REFERENCE, [block_of(name, weight) for name, weight in named])

    def expected(self, updates: int) -> list[Slice]:
        return self.state()

    @torch.no_grad()
    def restore(self, state: dict[str, Tensor], updates: int) -> None:
        for block in self.state():
            block.tensor.copy_(state[block.name])


def _prefixed(prefix: str, blocks: list[Slice]) -> list[Slice]:
    return [replace(block, name=prefix + block.name) for block in blocks]
