"""The key of a server, which a recipe names by its environment variable and never holds itself."""

from __future__ import annotations

import os

from tidemill.core.errors import ConfigError


def key_of(variable: str) -> str:
    """The value of the environment variable; "" where none is named. Raises ConfigError if it is not set."""
    if variable and not os.environ.get(variable):
        raise ConfigError(f"engine.key_variable = {variable!r}: this environment variable is not set; set it to the key")
    return os.environ[variable] if variable else ""
