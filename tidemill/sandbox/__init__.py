"""Sandbox: runs programs that nobody trusts, isolated and within limits."""
