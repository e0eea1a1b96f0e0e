"""A reward model as a reward: the number that a model for sequence classification gives after an answer's last token.

It runs in the scoring workers, each with a copy of its own, and judges a task's attempts in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from tidemill.envs.template import Tokenizer, as_messages, prompt_tokens
from tidemill.models.attention import packed_attention, packed_positions
from tidemill.models.tokenizer import load_tokenizer
from tidemill.models.value import ValueModel, load_value_model
from tidemill.types import Array


def score(completions: Sequence[Any], prompts: Sequence[Any], *, folder: str) -> list[float]:
    """The raw output for each completion, unbounded. folder: of the model, with its tokenizer. Raises ValueError when it is
    no such folder, or an attempt is longer than its context."""
    model, tokenizer = _loaded(folder)
    rows = [answered(tokenizer, prompt, _text(each)) for prompt, each in zip(prompts, completions, strict=True)]
    lengths, context = [len(row) for row in rows], model.decoder.arch.context
    if max(lengths) > context:
        raise ValueError(f"an attempt is {max(lengths)} tokens, and the context of {folder} holds {context}")
    tokens = torch.from_numpy(np.concatenate(rows).astype(np.int64))
    attend = packed_attention(lengths, model.decoder.arch.windows)
    with torch.inference_mode():
        hidden = model.decoder(tokens, packed_positions(lengths), attend)
        last = torch.tensor(lengths).cumsum(0) - 1
        return model.values(hidden[last]).tolist()


def answered(tokenizer: Tokenizer, prompt: str | Sequence[dict[str, str]], reply: str) -> Array:
    """[T] int32: the prompt as an episode begins, the reply, the end token."""
    assert tokenizer.eos_token_id is not None, "load_tokenizer refuses such"
    own = [*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id]
    return np.concatenate([prompt_tokens(tokenizer, as_messages(prompt)), np.array(own, np.int32)])


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


@lru_cache(maxsize=2)
def _loaded(folder: str) -> tuple[ValueModel, Any]:
    return load_value_model(folder), load_tokenizer(folder)
