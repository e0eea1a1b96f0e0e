"""Metrics, traces, progress and diagnosis of a run. It imports from `core` only."""
