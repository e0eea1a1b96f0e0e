"""What a user is told of a configuration. Apart from it: a scoring worker, which reads none, imports little."""

from __future__ import annotations


class ConfigError(ValueError):
    """The configuration, or something it names, is not usable. The message is for the user as it is."""
