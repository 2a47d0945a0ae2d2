"""Reservations that fail half-way: nothing of them stays."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore_service.client import NO_PARENT, PackRef, StoreError
from kvstore_service.daemon.store.uploads import Uploads
from kvstore_service.shared.types import PackRow
from tests.support.world import LAYOUT, TOKENS


def test_a_reservation_whose_cleaning_up_fails_too_keeps_no_promise(tmp_path: Path) -> None:
    """A copy thread that hangs owns no upload and gives none up; what was promised was counted for ever."""
    unpromised: list[int] = []
    numbers = itertools.count(1)

    def own(_worker: int, upload: int) -> None:
        if upload > 1:
            raise StoreError("UNAVAILABLE", "the copy thread does not answer")

    def abort(upload: int) -> None:
        raise StoreError("UNAVAILABLE", "nor for this")

    plane = SimpleNamespace(create_upload=lambda path, spec: next(numbers), own_upload=own, abort_upload=abort)
    room = SimpleNamespace(clear_disk=lambda size: None, unpromise=lambda tenant, size: unpromised.append(size))
    config = SimpleNamespace(nvme_bytes=0, pack_tokens=TOKENS, extent_blocks=4, upload_ttl_s=1.0, upload_stall_s=1.0)
    uploads = Uploads(
        *(cast(Any, part) for part in (plane, SimpleNamespace(packs_dir=tmp_path), 0, room, 0, 0, config))
    )
    session = SimpleNamespace(worker=SimpleNamespace(native_id=1, tenant="uid-0"), session_id="s")
    rows = [
        PackRow(PackRef(bytes([n]) * 32, bytes([n]) * 16, 0, TOKENS), NO_PARENT, LAYOUT, "uid-0", 1000) for n in (1, 2)
    ]
    with pytest.raises(StoreError, match="the copy thread does not answer"):
        uploads._create_all(cast(Any, session), rows)
    assert unpromised == [2000]
    assert uploads.open_count() == 0
    uploads.close()
