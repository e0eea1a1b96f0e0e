"""Environments: tasks, chats, the workers that play a user's code, and the rewards that judge."""
