"""From what size on it is worth while to wake threads, or to let them meet: measured on two cores (docs/performance.md)."""

from __future__ import annotations

import torch

ROWS = 16  # of a norm, a rotation, a gate, a softmax
MULTIPLICATIONS = 1 << 22  # of a product
QUERY_NUMBERS = 1 << 14  # of attention in a packed batch
BYTES = 1 << 18  # that are summed up or packed
LAYER_BYTES = 16 << 20  # where no layer is larger, a thread reads it sooner than it would meet the others five times
PASS_ROWS = 24  # a thread: with as many, multiplying by larger layers takes longer than reading them


def threads_for(size: int, worth: int) -> int:
    return torch.get_num_threads() if size >= worth else 1


def whole_pass(rows: int, layer_bytes: int) -> bool:
    """Whether each thread takes its part of these decoding rows through all layers, rather than its part of each product."""
    threads = torch.get_num_threads()
    return threads == 1 or rows >= PASS_ROWS * threads or layer_bytes <= LAYER_BYTES
