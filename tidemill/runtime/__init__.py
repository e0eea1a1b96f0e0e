"""Processes and the calls between them: where a role runs, how it is started, watched and reaped."""
