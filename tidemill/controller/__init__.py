"""The training loop: admission, rollouts, steps, and the care of engines and their weights."""
