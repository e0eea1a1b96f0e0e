"""Check of an engine's CUDA kernels: a small problem for each, against PyTorch.

Kernels that only a trainer needs are left out: every engine would have to compile them.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from tidemill.models.kernels.cuda.launchers import Gpu
from tidemill.models.kernels.rotation import Rotation


@torch.inference_mode()
@torch.autocast("cuda", enabled=False)  # the first caller may be computing in another dtype
def right(kernels: Gpu, device: torch.device) -> bool:
    """True if small problems come out as in PyTorch, in float64 where that would multiply in TF32."""
    heads = torch.linspace(-2, 2, 3 * 8 * 32, device=device).view(3, 8, 32)
    pages = torch.zeros((4, 2, 16, 64), device=device)
    table, width = torch.tensor([1, 2, 3, 1, 2, 3], dtype=torch.int32, device=device), torch.tensor([2], device=device)
    weight = torch.linspace(0.5, 1.5, 32, device=device)
    cos, sin = torch.cos(heads[:, :1, :16]).contiguous(), torch.sin(heads[:, :1, :16]).contiguous()
    a, b = F.rms_norm(heads[:, :6], (32,), weight, 1e-6).chunk(2, dim=-1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    how, ok = Rotation(cos, sin, 4, 2, (weight, weight), 1e-6), True
    for at in range(3):
        q = kernels.rotate_into(heads, how, pages, torch.arange(16 + at, 64, 16, dtype=torch.int32, device=device))
        ok &= torch.allclose(torch.cat((q, pages[1:, :, at, :32]), dim=1), turned, atol=1e-5)
        ok &= torch.equal(pages[1:, :, at, 32:], heads[:, 6:])
    lengths = torch.tensor([2, 3, 1], dtype=torch.int32, device=device)
    queries = heads[:, :4]
    seen, tiled = torch.empty_like(queries), torch.empty_like(queries)
    kernels.attend(pages, queries, table, width.int(), lengths, None, seen)
    tiles = torch.tensor([[0, 0, 0, 2], [0, 0, 0, 0], [2, 2, 2, 1]], dtype=torch.int32, device=device)
    kernels.attend_tiles(pages, queries, tiles, table, width.int(), None, tiled)
    kv = pages[table.view(3, 2)[:, 0].long()].double()  # rows 0, 1, 2 begin in pages 1, 3 and 2
    expected = [
        F.scaled_dot_product_attention(
            queries[i].double().unsqueeze(1), kv[row, :, :n, :32], kv[row, :, :n, 32:], enable_gqa=True
        ).squeeze(1)
        for i, row, n in ((0, 0, 2), (1, 1, 3), (2, 2, 1), (0, 0, 1), (1, 0, 2), (2, 2, 3))
    ]
    ok &= torch.allclose(torch.cat((seen, tiled)).double(), torch.stack(expected), atol=1e-5)
    ok &= torch.allclose(kernels.norm(heads, weight, 1e-6), F.rms_norm(heads, (32,), weight, 1e-6), atol=1e-5)
    q, k, _ = kernels.rotate(heads, how)
    ok &= torch.allclose(torch.cat((q, k), dim=1), turned, atol=1e-5)
    gate, up = heads[:, :2].flatten(1).chunk(2, dim=-1)
    ok &= torch.allclose(kernels.gate(heads[:, :2].flatten(1).contiguous()), F.silu(gate) * up, atol=1e-5)
    logits = heads.reshape(3, -1).contiguous()
    tokens, logprobs, _ = kernels.sample(logits, np.array([0.0, 1.0, 0.5]), np.array([0.3, 0.6, 0.9]))
    probabilities = torch.log_softmax(logits.double().cpu() * torch.tensor([[1.0], [1.0], [2.0]]), -1)
    reached = (probabilities.exp().cumsum(-1) <= torch.tensor([[0.3], [0.6], [0.9]])).sum(-1)
    wanted = torch.cat((probabilities[:1].argmax(-1), reached[1:])).numpy()
    own = probabilities.gather(1, torch.from_numpy(wanted)[:, None]).squeeze(1).numpy()
    return ok and bool((tokens == wanted).all()) and np.allclose(logprobs[1:], own[1:], atol=1e-4)
