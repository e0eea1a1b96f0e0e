"""`python -m tidemill.cli.algorithm_reference > docs/algorithms.md`"""

from tidemill.cli.algorithm_reference.entries import page

print(page(), end="")
