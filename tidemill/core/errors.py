"""The error for a configuration that cannot be used.

It has a module of its own so that a scoring worker, which reads no configuration, need not import pydantic.
"""

from __future__ import annotations


class ConfigError(ValueError):
    """The configuration, or something it names, cannot be used. The message is written for the user."""


class RenamedKey(FutureWarning):
    """A recipe uses the old name of a key, which still works. The message names the new one."""
