"""Processes that run a user's code, and may be killed at any time: the part that every kind of them shares."""
