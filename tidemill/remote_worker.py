"""The main module of a process that plays one role: `python -m tidemill.remote_worker`, started by `orchestration.local`."""

from __future__ import annotations

from functools import partial

from tidemill.build import build_role
from tidemill.orchestration.hosting import host

if __name__ == "__main__":
    host(partial(build_role, offload=True))
