"""Tidemill: asynchronous reinforcement-learning post-training for language models."""
