"""Rewards: functions that a recipe can name, and the calling convention for a user's own."""
