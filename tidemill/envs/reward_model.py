"""Reward model as a reward: a sequence-classification model's output at the last token.

It runs in the reward workers, each with a copy of the model, and judges a task's attempts in one forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from tidemill.models.attention import packed_attention, packed_positions
from tidemill.models.chat_template import as_messages
from tidemill.models.conversations import conversation
from tidemill.models.tokenizer import load_tokenizer
from tidemill.models.value_model import ValueModel, last_tokens, load_value_model


def score(completions: Sequence[Any], prompts: Sequence[Any], *, folder: str) -> list[float]:
    """The model's raw output for each completion. Raises ValueError when an attempt exceeds the context."""
    model, tokenizer = _loaded(folder)
    asked = zip(prompts, completions, strict=True)
    rows = [conversation(tokenizer, [(as_messages(prompt), _text(each))])[0] for prompt, each in asked]
    lengths, context = [len(row) for row in rows], model.decoder.arch.context
    if max(lengths) > context:
        raise ValueError(f"an attempt is {max(lengths)} tokens, and the context of {folder} holds {context}")
    tokens = torch.from_numpy(np.concatenate(rows).astype(np.int64))
    attend = packed_attention(lengths, model.decoder.arch.windows)
    with torch.inference_mode():
        begin = torch.tensor([0, *lengths[:-1]]).cumsum(0)
        last = begin + torch.tensor(last_tokens([row.tolist() for row in rows], model.decoder.arch))
        return model.values(model.decoder(tokens, packed_positions(lengths), attend, last)).tolist()


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


@lru_cache(maxsize=2)
def _loaded(folder: str) -> tuple[ValueModel, Any]:
    return load_value_model(folder), load_tokenizer(folder)
