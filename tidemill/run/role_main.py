"""Main module of the fork server, from which `runtime.local` starts a run's processes.

A process forked from it becomes an engine, a trainer, or the preparation of a run.
"""

from __future__ import annotations

from functools import partial

from tidemill.run.roles import build_role, import_roles, use_threads
from tidemill.runtime.role_host import host

if __name__ == "__main__":
    host(partial(build_role, offload=True), import_roles, use_threads)
