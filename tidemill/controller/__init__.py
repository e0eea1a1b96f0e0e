"""The training loop: admission, rollout, the step, and what it knows of engines and their weights."""
