"""What tells that training goes wrong, and why: engine against trainer, and what a step looks like. Pure, in NumPy."""
