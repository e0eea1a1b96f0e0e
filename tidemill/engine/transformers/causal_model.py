"""A causal model of `transformers`: logits of rows, with its own cache where that is exact, and its weights by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tidemill.core.errors import ConfigError, PolicyMismatch
from tidemill.models.weight_slices import Slice

CHUNK = 512  # tokens of one forward pass whose logits are all needed
TRIED = 12  # tokens by which the cache is tried
NEAR = {torch.float32: 1e-3, torch.bfloat16: 0.5}  # logits with and without the cache may differ by so much


class CausalModel:
    """A model in evaluation mode, whose rows are computed one at a time."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Load the folder's model. Raises ConfigError when `transformers` cannot."""
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            why = " ".join(str(error).split())[:300]
            raise ConfigError(f"{folder}: `transformers` cannot load a causal model from there ({why})") from error
        self._model, self._device, self.dtype = model.eval().requires_grad_(False).to(device), device, dtype
        text = model.config.get_text_config()
        self.vocab: int = text.vocab_size
        self.positions: int | None = getattr(text, "max_position_embeddings", None)
        ends = model.generation_config.eos_token_id if model.generation_config else text.eos_token_id
        self.ends: tuple[int, ...] = (ends,) if isinstance(ends, int) else tuple(ends or ())
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        self._cached = True
        self._cached = self._cache_is_exact()

    def following(self, tokens: list[int], cache: Any) -> tuple[Tensor, Any]:
        """Logits [1, V] float32 of what follows `tokens`, and the cache of all of them; cache: of some first ones."""
        done = cache.get_seq_length() if cache is not None else 0
        logits, cache = self._forward(tokens[done:], cache, self._last)
        return logits[-1:], cache

    def rows(self, tokens: np.ndarray) -> Iterator[Tensor]:
        """Logits [n, V] float32 at all tokens [T], in pieces that follow one another."""
        ids, cache = tokens.tolist(), None
        size = CHUNK if self._cached else len(ids)
        for begin in range(0, len(ids), size):
            logits, cache = self._forward(ids[begin : begin + size], cache, {})
            yield logits

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy these tensors, which `fit`, over the model's own."""
        own = self._model.state_dict()
        for name, tensor in weights.items():
            own[name].copy_(tensor)

    def held(self, names: Mapping[str, Tensor]) -> Iterator[Slice]:
        """The model's own tensors of these names, as they are served."""
        own = self._model.state_dict()
        return (Slice.whole(name, own[name]) for name in names)

    def fit(self, weights: Mapping[str, Tensor]) -> None:
        """Raise PolicyMismatch unless these are all of the model's weights, in its shapes and dtype."""
        own = self._model.state_dict()
        for name, tensor in weights.items():
            if (mine := own.get(name)) is None:
                raise PolicyMismatch(f"{name} is no weight of this model in `transformers`")
            if (mine.shape, mine.dtype) != (tensor.shape, tensor.dtype):
                raise PolicyMismatch(
                    f"{name} came as {tensor.dtype} {list(tensor.shape)}, and {mine.dtype} {list(mine.shape)} is served: "
                    "engine.dtype and trainer.serving_dtype must be alike"
                )
        given = {own[name].data_ptr() for name in weights}
        every = self._model.named_parameters(remove_duplicate=False)
        if lacking := [name for name, mine in every if mine.data_ptr() not in given]:  # tied ones share memory
            raise PolicyMismatch(f"the update lacks {lacking[0]} and {len(lacking) - 1} more weights of this model")

    def _forward(self, ids: list[int], cache: Any, more: dict[str, Any]) -> tuple[Tensor, Any]:
        tokens = torch.tensor([ids], device=self._device)
        with torch.inference_mode():
            found = self._model(input_ids=tokens, past_key_values=cache, use_cache=self._cached, **more)
        return found.logits[0].float(), found.get("past_key_values") if self._cached else None

    def _cache_is_exact(self) -> bool:
        """True if a row that is computed in two parts has the logits that it has as a whole."""
        ids = np.random.default_rng(0).integers(0, self.vocab, TRIED).tolist()
        try:
            _, cache = self._forward(ids[: TRIED // 2], None, {})
            if cache is None or cache.get_seq_length() != TRIED // 2:
                return False
            parts, _ = self._forward(ids[TRIED // 2 :], cache, {})
        except (TypeError, ValueError, AttributeError, RuntimeError, NotImplementedError):  # it has one of another kind
            return False
        self._cached = False
        whole, _ = self._forward(ids, None, {})
        return bool((whole[TRIED // 2 :] - parts).abs().max() <= NEAR[self.dtype])
