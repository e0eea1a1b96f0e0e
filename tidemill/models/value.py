"""A decoder with one number for each token in the place of a vocabulary: a critic, or a reward model.

On disk it is what transformers calls a model for sequence classification with one label: `score.weight` [1, D] beside the
decoder's tensors. The folder of a language model is read too: its values are 0 everywhere at first.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from tidemill.models.architecture import UnsupportedModel
from tidemill.models.decoder import Decoder
from tidemill.models.weights import SCORE, load_scored, save_folder


class ValueModel:
    """`decoder` may be the policy's own: then only the head belongs to it."""

    def __init__(self, decoder: Decoder, *, shared: bool = False) -> None:
        """The head begins as zeros, so that the first values are 0, whatever the hidden states."""
        self.decoder, self.shared = decoder, shared
        weight = decoder.embed.weight
        self.head = nn.Linear(decoder.arch.hidden, 1, bias=False, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(self.head.weight)

    @property
    def trained(self) -> nn.Module:
        """What is its own."""
        return nn.ModuleDict({"head": self.head} if self.shared else {"decoder": self.decoder, "head": self.head})

    def to(self, device: torch.device) -> None:
        self.decoder.to(device)
        self.head.to(device)

    def values(self, hidden: Tensor) -> Tensor:
        """[N] of hidden states [N, D]: float32 at least, as logits are."""
        wide = torch.promote_types(self.head.weight.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.to(wide), self.head.weight.to(wide)).squeeze(-1)

    def save(self, folder: str | Path, *, tokenizer_from: str | Path | None, dtype: torch.dtype) -> None:
        """Raises ValueError as `save_folder` does."""
        save_folder(self.decoder, folder, tokenizer_from=tokenizer_from, dtype=dtype, score=self.head.weight)


def load_value_model(folder: str | Path, dtype: torch.dtype = torch.float32) -> ValueModel:
    """Of a folder with or without a score. Raises UnsupportedModel as `load_folder` does, and for several labels."""
    decoder, score = load_scored(folder, dtype)
    model = ValueModel(decoder)
    if score is not None:
        if score.shape != model.head.weight.shape:
            wanted = list(model.head.weight.shape)
            raise UnsupportedModel(f"{folder}: {SCORE} is {list(score.shape)}, expected {wanted}, of one label")
        with torch.no_grad():
            model.head.weight.copy_(score)
    return model
