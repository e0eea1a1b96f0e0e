"""Inference engines, and the HTTP server in front of one."""
