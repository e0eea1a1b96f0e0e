"""The user of sandboxed programs in these tests, and what this machine forbids."""

from __future__ import annotations

import os

NO_TRACING = "ptrace: Operation not permitted"  # as where a container's filter, or `kernel.yama.ptrace_scope`, forbids it
USER = 64000 if os.getuid() == 0 else 0  # as `claimed_user` would give
