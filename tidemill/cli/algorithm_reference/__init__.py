"""The algorithms as people read of them: from their docstrings, `docs/algorithms.md` and what `explain` prints."""
