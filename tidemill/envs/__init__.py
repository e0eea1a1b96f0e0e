"""Environments: tasks, chats, worker processes for a user's code, and rewards."""
