"""Worker processes for user code, which may be killed at any time: what all kinds share."""
