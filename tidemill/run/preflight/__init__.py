"""Checks before a run starts: memory, tokenizer, and what a reward says of known replies."""
