"""A worker that does nothing wrong, and of whose work not a byte may change."""

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from kvstore_service.client import SidecarKey, StoreClient
from tests.support.world import LAYOUT, TOKENS, TestWorker, digest, expected, reservation

INDEX = b"an index of the victim"


class Victim:
    """Has a session with a committed pack, a bound slot, a sidecar and an open upload."""

    def __init__(self, client: StoreClient, number: int = 1) -> None:
        """Its packs are `number` and the next one of tests.support.world."""
        self.client = client
        self.number = number
        self.worker = TestWorker(client)
        self.session = client.open_session(LAYOUT, 4096)
        self.pack = self.worker.commit(self.session, number)
        client.attach_packs(self.session, [self.pack])
        self.epoch = client.bind_slot(self.session, 0, [self.pack], self.worker.windows(0))
        self.key = SidecarKey(self.pack.pack_id, self.pack.build, "hash")
        client.put_sidecar(self.key, INDEX)
        (reserved,) = client.reserve_pack(self.session, [reservation(number + 1, 1, self.pack.pack_id)])
        assert reserved.upload_id is not None
        self.upload_id = reserved.upload_id
        self.worker.store(self.upload_id, number + 1)

    def close(self) -> None:
        self.worker.close()

    def offer(self) -> str:
        """A transfer that waits for the victim's own PutSidecar."""
        return self.client._connection.offer("index", INDEX)

    def names(self) -> dict[str, str | int]:
        """All that another would have to know to reach the victim's things; bytes as hex digits."""
        return {
            "session_id": self.session,
            "slot": 0,
            "upload_id": self.upload_id,
            "upload_ids": self.upload_id,
            "transfer": self.offer(),
            "size": len(INDEX),
            "kind": "hash",
            "pack_id": self.pack.pack_id.hex(),
            "pack_ids": self.pack.pack_id.hex(),
            "build": self.pack.build.hex(),
            "parent": self.pack.pack_id.hex(),
            "first_token": self.pack.first_token,
            "tokens": TOKENS,
            "token_digest": digest(self.number).hex(),
            "fingerprint": LAYOUT.fingerprint.hex(),
        }

    def check(self) -> None:
        """Every record, the index and the upload are as they were. Commits the upload: once."""
        self.worker.window[:] = 0
        records = np.arange(TOKENS, dtype=np.uint32)
        assert (self.worker.gather(0, self.epoch, records) == expected([self.number], records)).all()
        assert self.client.get_sidecar(self.key) == INDEX
        again = self.client.commit_pack(self.session, [self.upload_id])[0]
        assert again.error is None
        assert again.pack is not None
        (reserved,) = self.client.reserve_pack(self.session, [reservation(self.number + 1, 1, self.pack.pack_id)])
        assert reserved.exists


def named(names: dict[str, str | int]):  # type: ignore[no-untyped-def]
    """For calls.fill: the fields that `names` knows."""

    def value(field: FieldDescriptor) -> object:
        given = names.get(field.name)
        return bytes.fromhex(given) if field.type == FieldDescriptor.TYPE_BYTES and isinstance(given, str) else given

    return value
