"""Vocabulary that every package shares: types, interfaces, settings, errors, files."""
