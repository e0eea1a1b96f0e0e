"""Checks of programs that a policy wrote, run in sandboxes: by cases, and by tests."""
