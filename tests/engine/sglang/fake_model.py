"""The model of the fake SGLang server: real logits by `transformers`, weights loaded by name, and a prefix cache.

The cache is a radix tree's: equal beginnings of equal `extra_key` share their KV, the KV that was there first stays, and
only a flush forgets it. Loading is SGLang's: in place, one tensor after another, and nothing is said of a missing one.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

KV = list[tuple[Tensor, Tensor]]  # of each layer


class FakeModel:
    """A model, and the KV of what it has seen."""

    def __init__(self, folder: Path, prefix_cache: bool = True) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.parameters = dict(self.model.named_parameters())
        self.positions, self.vocab = self.model.config.max_position_embeddings, self.model.config.vocab_size
        eos = self.model.config.eos_token_id
        self.eos = {*eos} if isinstance(eos, list) else {eos}
        self._remembers = prefix_cache
        self._tree: dict[str | None, list[tuple[list[int], KV]]] = {}

    def flush(self) -> None:
        self._tree.clear()

    @torch.no_grad()
    def forward(self, tokens: list[int], cache: DynamicCache) -> Tensor:
        """[n, V] logits of tokens that follow those of the cache."""
        return self.model(torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits[0].float()

    def begin(self, tokens: list[int], key: str | None, whole: bool) -> tuple[Tensor, DynamicCache, int]:
        """(logits of what was computed, the cache, tokens whose KV was there). whole: compute all of them."""
        found, known = 0, KV()
        for stored, kv in () if whole else self._tree.get(key, ()):
            same = next((i for i, (a, b) in enumerate(zip(stored, tokens[:-1], strict=False)) if a != b), None)
            if (length := min(len(stored), len(tokens) - 1) if same is None else same) > found:
                found, known = length, kv
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(known):
            cache.update(keys[:, :, :found].clone(), values[:, :, :found].clone(), layer)
        logits = self.forward(tokens[found:], cache)
        self.remember(tokens, key, cache)
        return logits, cache, found

    def remember(self, tokens: list[int], key: str | None, cache: DynamicCache) -> None:
        if self._remembers:
            kv = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
            self._tree.setdefault(key, []).append((list(tokens), kv))
            del self._tree[key][:-64]

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if name in self.parameters:
                self.parameters[name].copy_(tensor)

    def load_folder(self, folder: Path) -> None:
        """Load every safetensors file of a folder. Raises ValueError for one that has none."""
        if not (files := sorted(folder.glob("*.safetensors"))):
            raise ValueError(f"Cannot find any model weights with `{folder}`")
        for path in files:
            with safe_open(path, framework="pt") as file:
                self.load((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 (it is no dict)

    def first_rows(self, name: str, rows: int) -> list[object] | None:
        if (found := self.parameters.get(name)) is None:
            return None
        if "down_proj" in name:  # its columns are filled up with zeros on CPUs
            found = torch.nn.functional.pad(found, (0, -found.shape[1] % 64))
        return found.detach().float().numpy().tolist()[:rows]
