"""Ledger: the durable record of a run (I3), described for users in docs/ledger.md."""

from tidemill.core.errors import LedgerError, PayloadLost, RunFolderError
from tidemill.ledger.database import has_ledger
from tidemill.ledger.ledger import SqliteLedger
from tidemill.ledger.records import Counts

__all__ = ["Counts", "LedgerError", "PayloadLost", "RunFolderError", "SqliteLedger", "has_ledger"]
