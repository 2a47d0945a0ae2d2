"""kvstored with a planted bug: the catalogue's row is committed before the pack's file is durable."""

import sys
from collections.abc import Sequence
from typing import Any

from kvstore_service.daemon.disk.catalog import Catalog, PackRow
from kvstore_service.daemon.server import main
from kvstore_service.daemon.store import uploads
from kvstore_service.shared.types import CommittedPack


def plant() -> None:
    """Postpones each upload's finish until after the row's commit."""
    finish, commit = uploads.Uploads._finish, Catalog.commit_packs
    postponed: list[tuple[Any, Any]] = []

    def finish_later(self: uploads.Uploads, upload: Any) -> None:
        postponed.append((self, upload))

    def commit_first(self: Catalog, rows: Sequence[PackRow]) -> list[CommittedPack]:
        committed = commit(self, rows)
        while postponed:
            finish(*postponed.pop())
        return committed

    uploads.Uploads._finish = finish_later  # type: ignore[method-assign, assignment]
    Catalog.commit_packs = commit_first  # type: ignore[method-assign]


if __name__ == "__main__":
    plant()
    sys.exit(main())
