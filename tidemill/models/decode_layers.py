"""A decoder's weights in the form that the compiled decoding pass takes.

The pass computes rows of one token each: see `kernels.cpu.bindings.Native.decode`.
"""

from __future__ import annotations

from torch import Tensor

from tidemill.models.decoder import Decoder, Layer
from tidemill.models.kernels.cpu.decode_pass import MATRICES, NORMS, DecodingWeights
from tidemill.models.kernels.library import native


def decoding_weights(decoder: Decoder) -> DecodingWeights | None:
    """The decoder's packed weights; None if a matrix is not packed.

    They are valid until the weights change or are packed elsewhere.
    """
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
