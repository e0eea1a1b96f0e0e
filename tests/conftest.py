"""Shared fixtures. Tests use one thread of torch, so that they run beside each other and give the same numbers."""

import torch

torch.set_num_threads(1)
