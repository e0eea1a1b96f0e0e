"""Problem sizes from which more threads are faster, measured on two cores.

docs/performance.md has the measurements.
"""

from __future__ import annotations

import torch

ROWS = 16  # rows of a norm, a rotation, a gate, a softmax
MULTIPLICATIONS = 1 << 22  # multiplications of a product
QUERY_NUMBERS = 1 << 14  # numbers in the queries of attention in a packed batch
BYTES = 1 << 18  # bytes that are summed up or packed
LAYER_BYTES = 16 << 20  # a thread reads a layer of this size faster than it would synchronise with others five times
PASS_ROWS = 24  # rows per thread from which multiplying by larger layers takes longer than reading them


def threads_for(size: int, worth: int) -> int:
    return torch.get_num_threads() if size >= worth else 1


def whole_pass(rows: int, layer_bytes: int) -> bool:
    """True if each thread should take its rows through all layers, not its part of each product."""
    threads = torch.get_num_threads()
    return threads == 1 or rows >= PASS_ROWS * threads or layer_bytes <= LAYER_BYTES
