"""Reward functions that a recipe can name, and how a user's own are found and called."""
