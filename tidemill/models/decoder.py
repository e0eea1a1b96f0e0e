"""The decoder, one implementation for trainer and engine.

It computes on a flat row of tokens, with no batch dimension and no padding, and does not know how attention finds its
keys: the caller passes `attend(layer, q, k, v)`. The trainer attends inside packed sequences (`models.attention`), the
engine to its paged cache. All other code is the same on both sides, so that their logprobs agree. On CPUs,
`kernels/cpu/decoding.c` may compute a step in which every row decodes, to the same bits.

Projections that read the same input are one matrix (q|k|v and gate|up); `models.hf_weights` maps them to Hugging Face
names. Shapes: N tokens, D hidden, H query heads, K key/value heads, E head size, V vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from tidemill.models.adapter_dropout import recomputing
from tidemill.models.architecture import Architecture
from tidemill.models.kernels.cpu.decode_pass import MATRICES, NORMS, DecodingWeights
from tidemill.models.kernels.cpu.trained_kernels import Deferred, as_tensor, layer_kernels
from tidemill.models.kernels.library import native
from tidemill.models.kernels.rotation import Rotation
from tidemill.models.piecewise import Work
from tidemill.models.served_linear import NARROW, Linear, Packed

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [N, H, E], k [N, K, E], v [N, K, E]) -> [N, H, E]; causal, scaled by 1/sqrt(E), within the layer's window."""


class AttendHeads(ABC):
    """An `Attend` that norms and rotates the heads itself while it stores them."""

    @abstractmethod
    def __call__(self, layer: int, heads: Tensor, how: Rotation) -> Tensor:
        """[N, H, E] attention output for heads [N, H + 2K, E]: queries, keys, values."""


class RMSNorm(nn.Module):
    """Root-mean-square norm of the last dimension, times a weight.

    multiplied: only products read the output. It may then come out in the dtype to which autocast would narrow it, and
    be computed by the product that reads it.
    """

    def __init__(self, size: int, eps: float, *, multiplied: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.multiplied = eps, multiplied

    def forward(self, x: Tensor) -> Tensor | Deferred:
        if (compiled := layer_kernels(x, self.weight)) is not None:
            normed = compiled.norm(x, self.weight, self.eps, _product_dtype(x) if self.multiplied else x.dtype)
            return normed if self.multiplied else as_tensor(normed)
        if x.dtype == self.weight.dtype and x.dtype in (torch.float32, torch.float64):
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = F.rms_norm(x.float(), self.weight.shape, None, self.eps)  # statistics are float32 for every dtype of x
        return wide.to(x.dtype) * self.weight.to(x.dtype)


class Layer(nn.Module):
    def __init__(self, arch: Architecture, index: int) -> None:
        super().__init__()
        self.index, self.heads, self.kv_heads, self.head_dim = index, arch.heads, arch.kv_heads, arch.head_dim
        q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        self.input_norm = RMSNorm(arch.hidden, arch.norm_eps, multiplied=True)
        self.qkv = Linear(arch.hidden, q + 2 * kv, bias=arch.qkv_bias)
        self.q_norm = RMSNorm(arch.head_dim, arch.norm_eps) if arch.qk_norm else None
        self.k_norm = RMSNorm(arch.head_dim, arch.norm_eps) if arch.qk_norm else None
        self.o = Linear(q, arch.hidden, bias=arch.o_bias)
        self.post_norm = RMSNorm(arch.hidden, arch.norm_eps, multiplied=True)
        self.gate_up = Linear(arch.hidden, 2 * arch.intermediate, bias=arch.mlp_bias)
        self.down = Linear(arch.intermediate, arch.hidden, bias=arch.mlp_bias)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend | AttendHeads, wanted: Tensor | None = None
    ) -> Tensor:
        """The layer's output [N, D] for x [N, D]; with `wanted` [P] int64, only of these rows, [P, D]."""
        heads = self.qkv(self.input_norm(x)).view(x.shape[0], -1, self.head_dim)  # [N, H + 2K, E]
        if isinstance(attend, AttendHeads):
            seen = attend(self.index, heads, self._rotation(cos, sin)).flatten(1)
        else:
            seen = attend(self.index, *self._rotated(heads, self._rotation(cos, sin))).flatten(1)
        if wanted is not None:  # only keys and values of the other rows were needed
            x, seen = x.index_select(0, wanted), seen.index_select(0, wanted)
        x = self.o.onto(x, seen)
        return self.down.onto(x, gated(self.gate_up(self.post_norm(x))))

    def _rotation(self, cos: Tensor, sin: Tensor) -> Rotation:
        if self.q_norm is None or self.k_norm is None:
            return Rotation(cos, sin, self.heads, self.kv_heads)
        return Rotation(cos, sin, self.heads, self.kv_heads, (self.q_norm.weight, self.k_norm.weight), eps=self.q_norm.eps)

    def _rotated(self, heads: Tensor, how: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """(rotated queries [N, H, E] and keys [N, K, E], values) of heads [N, H + 2K, E]."""
        cos, sin = how.cos, how.sin
        if (compiled := layer_kernels(heads, cos, *(how.norms or ()))) is not None:
            return compiled.rotate(heads, how)
        qk, v = heads.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split([self.heads, self.kv_heads], dim=1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        q, k = rotate(qk, cos, sin).split([self.heads, self.kv_heads], dim=1)
        return q, k, v


class Decoder(nn.Module):
    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch = arch
        self.inverse_frequencies: Tensor
        self.embed = nn.Embedding(arch.vocab, arch.hidden)
        self.layers = nn.ModuleList(Layer(arch, i) for i in range(arch.layers))
        self.norm = RMSNorm(arch.hidden, arch.norm_eps)
        self.head = None if arch.tied else nn.Linear(arch.hidden, arch.vocab, bias=False)
        self.packed_head = Packed()
        frequencies = rope_frequencies(arch).to(self.embed.weight.device)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        """Convert the module; rotary frequencies stay float32, lest far positions blur."""
        super()._apply(fn, recurse)
        for _, _, packed in self.packed():
            packed.numbers = None
        self.inverse_frequencies = rope_frequencies(self.arch).to(self.embed.weight.device)
        return self

    def packing(self) -> Work[None]:
        """Pack every matrix for products without a gradient, until the weights change."""
        for _, weight, packed in self.packed():
            yield from packed.packing(weight)

    def packed(self) -> Iterator[tuple[str, Tensor, Packed]]:
        """(module name, weight, packed copy) of every matrix."""
        for name, module in self.named_modules():
            if isinstance(module, Linear):
                yield name, module.weight, module.packed
        yield "head", self.head_weight, self.packed_head

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend | AttendHeads,
        wanted: Tensor | None = None,
        *,
        checkpointing: float = 0.0,
    ) -> Tensor:
        """Hidden states [N, D] after the last norm, for `tokens` [N] at `positions` [N].

        wanted: [P] int64, the only tokens whose hidden states are returned, [P, D]; this saves work in the last layer.
        checkpointing: share of the layers whose activations are computed again in the backward pass.
        """
        x = self.embed(tokens)
        cos, sin = self.rope(positions, _product_dtype(x))  # in autocast's dtype too, as a bfloat16 model has them
        for index, layer in enumerate(self.layers):
            given = (x, cos, sin, attend, wanted if index == len(self.layers) - 1 else None)
            again = recomputed(index, checkpointing)
            x = recompute(layer, *given, use_reentrant=False, context_fn=recomputing) if again else layer(*given)
        return self.norm(x)

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix [V, D]."""
        return self.embed.weight if self.head is None else self.head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] in float32 at least, because low precision costs most here."""
        wide = torch.promote_types(self.head_weight.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.to(wide), self.head_weight.to(wide))

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [N, 1, E / 2], of the positions [N]."""
        angles = positions.to(torch.float32)[:, None, None] * self.inverse_frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator, std: float = 0.02) -> None:
        """Set random weights: normal(0, std), less at outputs, norms 1, biases 0 (GPT-2)."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                scale = 1 / math.sqrt(2 * self.arch.layers) if name.endswith(("o.weight", "down.weight")) else 1.0
                parameter.normal_(0.0, std * scale, generator=generator)


def recomputed(layer: int, share: float) -> bool:
    """True if a layer is among the given share of layers, which are spread evenly."""
    return math.floor((layer + 1) * share) > math.floor(layer * share)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [N, heads, E], in the half-split layout of Hugging Face checkpoints."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a product reads x: bfloat16 if autocast narrows to it, else x's own."""
    device = x.device.type
    narrows = x.dtype == torch.float32 and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == NARROW
    return NARROW if narrows else x.dtype


def gated(gate_up: Tensor) -> Tensor | Deferred:
    """silu(gate) * up (SwiGLU, 2002.05202) of both side by side [N, 2 I], for a product."""
    if (compiled := layer_kernels(gate_up)) is not None:
        return compiled.gate(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope_frequencies(arch: Architecture) -> Tensor:
    """[E / 2] float32 inverse rotary frequencies (RoFormer, 2104.09864; Llama 3.1)."""
    exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.int64, device="cpu").float() / arch.head_dim
    frequencies = 1.0 / (arch.rope_theta**exponents) / arch.rope_factor
    if (scaling := arch.rope_llama3) is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((scaling.original_context / wavelengths - low) / (high - low)).clamp(0, 1)  # 1: keep, 0: stretch
    return frequencies * blend + frequencies / scaling.factor * (1 - blend)


def decoding_weights(decoder: Decoder) -> DecodingWeights | None:
    """The weights for compiled decoding, until they change; None if one is not packed."""
    compiled, arch = native(), decoder.arch
    layers = [_weights(layer) for layer in decoder.layers if isinstance(layer, Layer)]
    if compiled is None or any(layer[name] is None for layer in layers for name in MATRICES):
        return None
    dtype = decoder.norm.weight.dtype
    if any(t is not None and t.dtype != dtype for layer in layers for t in layer.values()):
        return None
    shape = {"heads": arch.heads, "kv_heads": arch.kv_heads, "head_dim": arch.head_dim, "intermediate": arch.intermediate}
    products, ends = compiled.products[dtype], (decoder.embed.weight.detach(), decoder.norm.weight.detach())
    return DecodingWeights(layers, *ends, **shape, products=products, eps=arch.norm_eps)


def _weights(layer: Layer) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {}
    for name in MATRICES:
        module = getattr(layer, name)
        found |= {name: module.packed.numbers, f"{name}_bias": None if module.bias is None else module.bias.detach()}
    for name in NORMS:
        norm = getattr(layer, name)
        found[name] = None if norm is None else norm.weight.detach()
    return found
