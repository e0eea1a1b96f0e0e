"""Exceptions that end a command with one sentence instead of a traceback.

They are neither mistakes of the user nor bugs here. Each says what happened.
"""

from __future__ import annotations

from tidemill.controller.controller import RunFailed
from tidemill.core.interfaces import PolicyMismatch, TrainingDiverged
from tidemill.envs.chat import EnvironmentLost
from tidemill.ledger.records import LedgerError
from tidemill.runtime.placement import StartFailed
from tidemill.runtime.wire_format import PeerDied, PeerTimeout, RemoteError

KNOWN = (RunFailed, LedgerError, StartFailed, PeerDied, PeerTimeout, RemoteError, PolicyMismatch, TrainingDiverged)
KNOWN += (EnvironmentLost, ValueError, OSError)
