"""From scored groups to gradients: advantages and reductions in NumPy, losses in torch, all pure functions."""
