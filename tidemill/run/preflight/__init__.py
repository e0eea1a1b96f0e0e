"""Checks before a run starts: memory, tokenizer, and the reward on known replies."""
