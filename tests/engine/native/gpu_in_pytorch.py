"""A CUDA device's steps without one: the kernels' contracts are met by PyTorch, and a recorded step is computed again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.engine.native import native_engine
from tidemill.engine.native.cuda_graphs import GpuCache
from tidemill.engine.native.sampler import RowParams, Sampled, sample
from tidemill.models.decoder import rotate
from tidemill.models.kernels.rotation import Rotation


def compute_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are built from now on take steps as on a device."""
    monkeypatch.setattr(native_engine, "paged_cache", lambda *shape: ComputedAgain(*shape, InPyTorch()))  # pyright: ignore


class InPyTorch:
    """What `kernels.cuda.launchers.Gpu` promises of what an engine asks of it."""

    def rotate_into(self, heads: Tensor, how: Rotation, pages: Tensor, writes: Tensor) -> Tensor:
        qk, v = heads[:, : -how.keys], heads[:, -how.keys :]
        if how.norms is not None:
            of_each = torch.stack([how.norms[0]] * how.queries + [how.norms[1]] * how.keys)
            qk = F.rms_norm(qk, qk.shape[-1:], None, how.eps) * of_each
        q, k = rotate(qk, how.cos, how.sin).split([how.queries, how.keys], dim=1)
        size = pages.shape[2]
        for row, to in enumerate(writes.tolist()):
            pages[to // size, :, to % size] = torch.cat((k[row], v[row]), dim=-1)
        return q

    def attend(
        self, pages: Tensor, q: Tensor, table: Tensor, width: Tensor, lengths: Tensor, window: int | None, out: Tensor
    ) -> None:
        columns, size, group = int(width), q.shape[2], q.shape[1] // pages.shape[1]
        for row, length in enumerate(lengths.tolist()):
            own = pages[table[row * columns : (row + 1) * columns].long()]  # [columns, K, page, 2 E]
            seen = slice(max(0, length - (window or length)), length)
            kv = own.transpose(0, 1).flatten(1, 2)[:, seen].repeat_interleave(group, 0)
            weights = torch.softmax((kv[..., :size] @ q[row, :, :, None]).squeeze(-1) * size**-0.5, -1)
            out[row] = (weights[:, None] @ kv[..., size:]).squeeze(1)

    @staticmethod
    def tile(heads: int, kv_heads: int) -> int:
        return 3

    def attend_tiles(
        self, pages: Tensor, q: Tensor, tiles: Tensor, table: Tensor, width: Tensor, window: int | None, out: Tensor
    ) -> None:
        columns = int(width)
        for of, first, position, count in tiles.tolist():
            assert count <= 3
            for i in range(count):
                lengths, row = torch.tensor([position + i + 1]), slice(first + i, first + i + 1)
                self.attend(pages, q[row], table[of * columns :], width, lengths, window, out[row])

    def feed(self, tokens: Tensor, sampled: Tensor) -> Tensor:
        return torch.tensor(
            [int(sampled[-1 - token]) if token < 0 else token for token in tokens.tolist()], dtype=torch.int32
        )

    def sampling(
        self, logits: Tensor, temperature: np.ndarray, uniform: np.ndarray, into: Tensor
    ) -> Callable[[], tuple[np.ndarray, np.ndarray, np.ndarray]]:
        ones, zeros = np.ones(len(logits)), np.zeros(len(logits))
        try:
            found = sample(logits, RowParams(temperature, ones, zeros.astype(np.int64), zeros, uniform))
        except FloatingPointError:
            found = Sampled(zeros.astype(np.int64), *(np.full(len(logits), np.nan, np.float32) for _ in range(2)))
        into[: len(logits)] = torch.from_numpy(found.tokens)
        return lambda: (found.tokens, found.logprobs, found.model_logprobs)


class ComputedAgain(GpuCache):
    records = 0

    def _record(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.records += 1
        hidden = compute()

        def again() -> None:
            hidden.fill_(torch.nan)  # what no replay writes shows
            hidden.copy_(compute())

        return again, hidden
