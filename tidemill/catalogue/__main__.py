"""`python -m tidemill.catalogue > docs/algorithms.md`"""

from tidemill.catalogue.entries import page

print(page(), end="")
