"""Value models: a decoder with one number per token, used as critic or reward model.

On disk it is what transformers calls a model for sequence classification with one label: `score.weight` [1, D] beside
the decoder's tensors. A language model's folder can be read too: its values are 0 everywhere at first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tidemill.core.errors import UnsupportedModel
from tidemill.models.adapter_config import BaseDtype
from tidemill.models.architecture import Architecture
from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import SCORE, save_folder
from tidemill.models.quantised_base import load_quantised_scored
from tidemill.models.tokenizer import generation_config, load_tokenizer, stop_ids


class ValueHead(nn.Linear):
    """One number for each hidden state, computed in float32 at least."""

    def forward(self, input: Tensor) -> Tensor:
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        with torch.autocast(input.device.type, enabled=False):
            return nn.functional.linear(input.to(wide), self.weight.to(wide)).squeeze(-1)


class ValueModel:
    """A decoder and a value head. The decoder may be the policy's own; then only the head belongs to it."""

    def __init__(self, decoder: Decoder, *, shared: bool = False) -> None:
        """The head begins with zeros, so that the first values are 0 for any hidden states."""
        self.decoder, self.shared = decoder, shared
        weight = decoder.embed.weight
        self.head = ValueHead(decoder.arch.hidden, 1, bias=False, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(self.head.weight)

    @property
    def trained(self) -> nn.Module:
        """The modules that belong to it: the head, and the decoder unless that is shared."""
        return nn.ModuleDict({"head": self.head} if self.shared else {"decoder": self.decoder, "head": self.head})

    def to(self, device: torch.device) -> None:
        self.decoder.to(device)
        self.head.to(device)

    def values(self, hidden: Tensor) -> Tensor:
        """Values [N] of hidden states [N, D], at least float32, as logits are."""
        return self.head(hidden)

    def save(
        self,
        folder: str | Path,
        *,
        tokenizer_from: str | Path | None,
        dtype: torch.dtype,
        tensors: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        """Write it as a Hugging Face folder. Raises ValueError as `save_folder` does.

        tensors: those to write, by name; None: the decoder's, without an adapter, and the head's.
        """
        save_folder(
            self.decoder,
            folder,
            tokenizer_from=tokenizer_from,
            dtype=dtype,
            score=self.head.weight,
            pad=padding_id(self.decoder.arch, tokenizer_from),
            tensors=tensors,
        )


def padding_id(arch: Architecture, tokenizer_from: str | Path | None) -> int | None:
    """The padding id of the configuration or tokenizer; None if a row may end with it.

    transformers reads the score after a row's last token that is no padding. If the end token were the padding, it would
    skip the token that was trained. Without an id, it takes one row at a time and refuses several.
    """
    pads: list[Any] = [arch.raw.get("pad_token_id")]
    ends = set(arch.eos_ids)
    if tokenizer_from is not None:
        tokenizer: Any = load_tokenizer(tokenizer_from)
        ends |= {*stop_ids(tokenizer, arch, generation_config(tokenizer_from))}
        pads.append(tokenizer.pad_token_id)
    return next((pad for pad in pads if type(pad) is int and 0 <= pad < arch.vocab and pad not in ends), None)


def last_tokens(rows: Sequence[Sequence[int]], arch: Architecture) -> list[int]:
    """The index in each row whose value transformers returns: the last token that is no padding."""
    pad = arch.raw.get("pad_token_id")
    places = ([i for i, token in enumerate(row) if pad is None or token != pad] for row in rows)
    return [found[-1] if found else 0 for found in places]


def load_value_model(folder: str | Path, base_dtype: BaseDtype = "float32") -> ValueModel:
    """The value model of a folder, scored or not. Raises as `load_folder` does.

    base_dtype: numbers in which the layers' matrices are held, to train an adapter on them.
    """
    decoder, score = load_quantised_scored(folder, base_dtype)
    model = ValueModel(decoder)
    if score is not None:
        if score.shape != model.head.weight.shape:
            wanted = list(model.head.weight.shape)
            raise UnsupportedModel(f"{folder}: {SCORE} is {list(score.shape)}, expected {wanted}, of one label")
        with torch.no_grad():
            model.head.weight.copy_(score)
    return model
