"""What a worker keeps of packs: bytes are bounded, and what a session has exists once."""

import gc
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np

from decode_worker.packs import IndexedPack, PackCatalogue
from decode_worker.retrieval.index import PackIndex
from kvstore_service.client import PackRef

PARAMETERS = b"p" * 32
PACK_BYTES = 2 * 2 * 256 * (2 + 32)


def pack(number: int) -> IndexedPack:
    order = np.zeros((2, 2, 256), dtype=np.uint16)
    index = PackIndex(PARAMETERS, np.zeros((2, 2, 256, 32), dtype=np.uint8))
    return IndexedPack(PackRef(number.to_bytes(32, "big"), b"b" * 16, 0, 256), order, index)


def catalogue(**limits: int) -> PackCatalogue:
    sidecars: dict[Any, bytes] = {}
    client: Any = SimpleNamespace(
        put_sidecar=sidecars.__setitem__,
        get_sidecar=sidecars.get,
        get_map=lambda _: np.zeros((2, 2, 256), dtype=np.uint16),
    )
    retriever: Any = SimpleNamespace(
        name="hash", parameters=PARAMETERS, load=lambda blob: PackIndex.load(blob, PARAMETERS)
    )
    return PackCatalogue(client, retriever, **limits)


def test_packs_are_kept_by_their_bytes_the_latest_ones() -> None:
    packs = catalogue(kept_bytes_max=4 * PACK_BYTES)
    made = [pack(number) for number in range(10)]
    assert made[0].nbytes == PACK_BYTES
    refs, living = [each.ref for each in made], [ref(each) for each in made]
    for each in made:
        packs.publish([each])
        packs.publish([each])
    del made, each
    gc.collect()
    assert [i for i, one in enumerate(living) if one() is not None] == [6, 7, 8, 9]
    assert packs.find(refs[6]) is living[6]()
    assert packs.find(refs[0]) is not None, "the store has it"
    assert [i for i, one in enumerate(living) if one() is not None] == [6, 8, 9]


def test_what_a_session_has_is_not_loaded_again() -> None:
    packs = catalogue(kept_bytes_max=PACK_BYTES)
    mine = pack(1)
    packs.publish([mine])
    packs.publish([pack(2)])
    assert packs.find(mine.ref) is mine
