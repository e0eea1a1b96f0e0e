"""Reward workers: processes that run reward functions and are killed at their limit."""
