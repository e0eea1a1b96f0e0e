"""Changes of a request to its logits before sampling: penalties, bias, minimum length.

They apply in this order: the repetition penalty of Keskar et al. (2019) on the model's own logits, the frequency and
presence penalties of OpenAI's interface, the bias, and `min_tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tidemill.core.types import SamplingParams

NEVER = -1e9  # a logit of probability 0; finite, so that a row of such logits is still a distribution


@dataclass(frozen=True, slots=True)
class Adjustment:
    """The changes of one row of a step."""

    params: SamplingParams
    ends: tuple[int, ...]  # ids that end the reply
    prompt: np.ndarray  # [P] token ids
    reply: np.ndarray  # [n] token ids sampled so far

    def apply(self, logits: Tensor) -> None:
        """Change `logits` [V] float32 in place."""
        asked, device = self.params, logits.device
        if asked.repetition_penalty != 1:
            seen = _indices(np.union1d(self.prompt, self.reply), device)
            own = logits[seen]
            logits[seen] = torch.where(own > 0, own / asked.repetition_penalty, own * asked.repetition_penalty)
        if asked.frequency_penalty or asked.presence_penalty:
            ids, counts = np.unique(self.reply, return_counts=True)
            taken = asked.frequency_penalty * counts + asked.presence_penalty
            logits[_indices(ids, device)] -= torch.from_numpy(taken).to(device, logits.dtype)
        if asked.logit_bias:
            ids, added = zip(*asked.logit_bias, strict=True)
            logits[_indices(np.array(ids), device)] += torch.tensor(added, dtype=logits.dtype, device=device)
        if len(self.reply) < asked.min_tokens and self.ends:
            logits[_indices(np.array(self.ends), device)] = NEVER


def _indices(ids: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64)).to(device)
