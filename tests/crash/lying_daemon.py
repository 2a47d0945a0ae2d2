"""kvstored with a planted bug: commits are acknowledged, and even served, while their transaction is still open."""

import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.daemon.server import main


@contextmanager
def never_committed(self: Catalog) -> Iterator[sqlite3.Connection]:
    with self._lock:
        if not self._db.in_transaction:
            self._db.execute("BEGIN IMMEDIATE")
        yield self._db


if __name__ == "__main__":
    Catalog._transaction = never_committed  # type: ignore[method-assign]
    sys.exit(main())
