"""The user of sandboxed programs in these tests."""

from __future__ import annotations

import os

USER = 64000 if os.getuid() == 0 else 0  # as `claimed_user` would give
