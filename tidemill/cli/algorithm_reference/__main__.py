"""Prints `docs/algorithms.md`: `python -m tidemill.cli.algorithm_reference`."""

from tidemill.cli.algorithm_reference.entries import page

print(page(), end="")
