"""kvstored with a planted bug: commits are acknowledged, and even served, while their transaction is still open."""

import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore_service.daemon.disk.database import Database
from kvstore_service.daemon.server import main


@contextmanager
def never_committed(self: Database) -> Iterator[sqlite3.Connection]:
    with self.lock:
        if not self.connection.in_transaction:
            self.connection.execute("BEGIN IMMEDIATE")
        yield self.connection


if __name__ == "__main__":
    Database.transaction = never_committed  # type: ignore[method-assign]
    sys.exit(main())
