"""Reference policy beside the trained one: the anchor of a KL divergence, or a teacher."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill.models.decoder import Decoder

_PREFIX = "reference."  # prefix of its tensors in a checkpoint


@dataclass(slots=True)
class Reference:
    """A frozen decoder, or one that follows the policy after every `every` updates (0: never).

    It then becomes decay * itself + (1 - decay) * the policy.
    """

    decoder: Decoder
    every: int = 0
    decay: float = 0.0

    def beside(self, policy: Decoder) -> Reference:
        """Move the reference to the policy's device.

        Raises ValueError when vocabularies differ, or when it must follow a policy of another architecture.
        """
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
                own.lerp_(other, 1 - self.decay)

    def state(self) -> dict[str, Tensor]:
        """Tensors for a checkpoint, by name; none for a reference that never moves."""
        return {_PREFIX + name: p.detach() for name, p in self.decoder.named_parameters()} if self.every else {}

    def expected(self, updates: int) -> dict[str, Tensor]:
        """Names of `state()` after `updates` updates, each with a tensor of its shape and dtype."""
        return self.state()

    @torch.no_grad()
    def restore(self, state: dict[str, Tensor], updates: int) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
