"""The algorithms' documentation, for `docs/algorithms.md` and `tidemill explain`."""
