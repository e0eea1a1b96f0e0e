"""Rollouts by SGLang: a server in an environment of its own, or at an address, that is given verified weights."""
