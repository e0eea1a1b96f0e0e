"""Main module of the fork server: its children become a run's processes."""

from __future__ import annotations

from functools import partial

from tidemill.run.roles import build_role, import_roles, use_threads
from tidemill.runtime.role_host import host

if __name__ == "__main__":
    host(partial(build_role, offload=True), import_roles, use_threads)
