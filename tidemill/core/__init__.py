"""Vocabulary that every package shares: types, interfaces, settings, errors, serialization, files and threads."""
