"""Reward functions in worker processes that are killed at their limit."""
