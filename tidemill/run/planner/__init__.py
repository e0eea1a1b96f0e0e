"""Estimates of what a run needs before it starts."""
