"""Transports that carry weights from the trainer to the engines, and the manifest of a version."""
