"""Escape suite: small programs that try to get out of a sandbox, each by one way."""
