"""Rollouts by vLLM: a server in an environment of its own, whose weights are verified before and after each update."""
