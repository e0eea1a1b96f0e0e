"""The main module of the processes that roles play in: `python -m tidemill.run.role_main`, started by `runtime.local`.

It is the fork server; what is forked from it becomes an engine, a trainer, or what prepares a run.
"""

from __future__ import annotations

from functools import partial

from tidemill.run.roles import build_role, import_roles, use_threads
from tidemill.runtime.role_host import host

if __name__ == "__main__":
    host(partial(build_role, offload=True), import_roles, use_threads)
