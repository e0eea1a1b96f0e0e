"""Functions that no file holds, such as those of a notebook, for processes that import what they run."""
