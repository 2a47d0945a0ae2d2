"""A process that keeps a daemon busy and says what it was told: python -m tests.crash.load SOCKET BROKER

A line of stdin starts one life: WRITERS workers against a daemon that just came up, until the daemon is killed under
them. A line of stdout is one event, written the moment it is known:

    ready     a worker is registered
    reserved  `chain` from pack `have` on is about to be written
    sending   its commit is about to be called
    acked     the commit was answered: `packs` (id, build) of the whole chain are durable
    aborted   it was given up: nobody may ever find it
    sidecar   of pack `number`: about to be written, or `acked`
    ended     by an error, which is the daemon's death or a failure: the reader judges

Payloads are a function of their address (tests/support/world.py), so that whoever finds a pack can check it.
"""

import itertools
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from typing import Any

import numpy as np

from decode_worker._native import RingError
from kvstore_service.client import PackRef, SidecarKey, StoreClient, StoreError
from tests.support.world import LAYOUT, PLACES, TOKENS, TestWorker, candidate, expected, records_of, reservation

WRITERS = 2
PACKS_MAX = 4
NUMBERS_PER_WRITER = 1 << 12
SIDECAR_KIND = "hash"
TEXT_MAX = 2000  # a line within PIPE_BUF is written whole

Chain = tuple[int, ...]


def sidecar_of(number: int) -> bytes:
    return records_of(number, 0, 0).tobytes()[: 1 + number % 5000]


class Reader:
    """Finds chains by their tokens and compares what the daemon gathers, record for record."""

    def __init__(self, client: StoreClient) -> None:
        self.client = client
        self.worker = TestWorker(client)

    def close(self) -> None:
        self.worker.close()

    def find(self, chain: Chain) -> list[PackRef]:
        """The packs of the longest stored beginning of `chain`."""
        return self.client.lookup_prefix(LAYOUT.fingerprint, [candidate(n, i) for i, n in enumerate(chain)])

    def wrong_records(self, chain: Chain, refs: list[PackRef], slot: int = 0) -> int:
        """How many of all records of these packs, numbered as in `chain`, differ from what was written."""
        session = self.client.open_session(LAYOUT, PACKS_MAX * TOKENS)
        self.client.attach_packs(session, refs)
        epoch = self.client.bind_slot(session, slot, refs, self.worker.windows(slot))
        wrong = 0
        for first in range(0, len(refs) * TOKENS, PLACES):
            records = np.arange(first, min(first + PLACES, len(refs) * TOKENS), dtype=np.uint32)
            differs = self.worker.gather(slot, epoch, records) != expected(list(chain[: len(refs)]), records)
            wrong += int(differs.any(axis=-1).sum())
        self.client.close_session(session)
        return wrong


class Writer:
    """One worker of one life. Every method is one piece of mixed work."""

    def __init__(self, order: dict[str, Any], index: int) -> None:
        self._order, self._index = order, index
        self._random = random.Random(f"{order['seed']} {index}")
        first = (order["life"] * WRITERS + index) * NUMBERS_PER_WRITER
        self._numbers = iter(range(first, first + NUMBERS_PER_WRITER))
        self._chains: list[Chain] = [tuple(chain) for chain in order["chains"]]

    def run(self, socket: str, broker: str) -> None:
        try:
            with StoreClient.connect(socket, broker, f"load-{self._index}", timeout_s=20.0) as client:
                self._client, self._reader = client, Reader(client)
                self._say("ready")
                works = (self.write, self.write, self.write, self.seal, self.abort, self.race, self.read)
                while True:
                    self._random.choice(works)()
        except StoreError as error:
            self._say("ended", error=error.code, text=str(error))
        except RingError as error:
            self._say("ended", error=type(error).__name__, text=str(error))
        except BaseException as error:
            self._say("ended", error=type(error).__name__, text=traceback.format_exc()[-TEXT_MAX:])

    # work

    def write(self) -> None:
        """A new chain, committed at once; then perhaps read back, forked, and given sidecars."""
        chain = self._new_chain(self._random.randint(1, 3))
        session = self._client.open_session(LAYOUT, PACKS_MAX * TOKENS)
        uploads = self._reserve(session, chain)
        for upload_id, number in zip(uploads, chain, strict=True):
            self._reader.worker.store(upload_id, number)
        refs = self._commit(session, chain, uploads)
        if self._random.random() < 0.5:
            self._put_sidecar(chain[0], refs[0])
        if self._random.random() < 0.3:
            self._check(chain, refs)
            self._client.attach_packs(session, refs)
            self._client.close_session(self._client.fork_session(session))
        self._client.close_session(session)

    def seal(self) -> None:
        """A chain grows by one pack while it is bound, as a tail does."""
        chain = self._known_chain()
        if not chain or len(chain) == PACKS_MAX:
            return
        worker, grown = self._reader.worker, (*chain, next(self._numbers))
        session = self._client.open_session(LAYOUT, PACKS_MAX * TOKENS)
        refs = self._reader.find(chain)
        assert len(refs) == len(chain), f"{len(refs)} packs found of chain {chain}"
        self._client.attach_packs(session, refs)
        epoch = self._client.bind_slot(session, 1, refs, worker.windows(1))
        (reserved,) = self._client.reserve_pack(session, [reservation(grown[-1], len(chain), refs[-1].pack_id)])
        assert reserved.upload_id is not None
        self._say("reserved", chain=grown, have=len(chain))
        worker.store(reserved.upload_id, grown[-1])
        self._say("sending")
        refs.append(self._client.seal_tail(session, reserved.upload_id))
        self._acked(grown, refs)
        records = np.arange((len(grown) - 1) * TOKENS, len(grown) * TOKENS, dtype=np.uint32)
        np.testing.assert_array_equal(worker.gather(1, epoch, records), expected(list(grown), records))
        self._client.unbind_slot(1)
        self._client.close_session(session)

    def abort(self) -> None:
        """A chain that is given up, its last pack half written."""
        chain = self._new_chain(2)
        session = self._client.open_session(LAYOUT, PACKS_MAX * TOKENS)
        uploads = self._reserve(session, chain)
        self._reader.worker.store(uploads[0], chain[0])
        self._reader.worker.store(uploads[1], chain[1], range(1))
        self._client.abort_pack(uploads)
        self._say("aborted", chain=chain, have=0)
        self._client.close_session(session)

    def race(self) -> None:
        """The same pack from two sessions: the first commit wins, the second gets its build."""
        chain = self._new_chain(1)
        sessions = [self._client.open_session(LAYOUT, TOKENS) for _ in range(2)]
        uploads = [self._reserve(session, chain)[0] for session in sessions]
        for upload_id in uploads:
            self._reader.worker.store(upload_id, chain[0])
        refs = self._commit(sessions[0], chain, uploads[:1])
        (second,) = self._client.commit_pack(sessions[1], uploads[1:])
        assert second.exists, "the second commit of a pack won"
        assert second.pack == refs[0], "the second commit got another build than the winner's"
        for session in sessions:
            self._client.close_session(session)

    def read(self) -> None:
        chain = self._known_chain()
        if chain:
            self._check(chain, self._reader.find(chain))

    # parts of it

    def _new_chain(self, packs: int) -> Chain:
        return tuple(itertools.islice(self._numbers, packs))

    def _known_chain(self) -> Chain:
        return self._random.choice(self._chains) if self._chains else ()

    def _reserve(self, session: str, chain: Chain) -> list[int]:
        reserved = self._client.reserve_pack(session, [reservation(n, i) for i, n in enumerate(chain)])
        self._say("reserved", chain=chain, have=0)
        uploads = [item.upload_id for item in reserved if item.upload_id is not None]
        assert len(uploads) == len(chain), "a pack that nobody wrote exists"
        return uploads

    def _commit(self, session: str, chain: Chain, uploads: list[int]) -> list[PackRef]:
        self._say("sending")
        committed = self._client.commit_pack(session, uploads)
        refs = [item.pack for item in committed if item.pack is not None and not item.exists]
        assert len(refs) == len(chain), f"a commit failed: {committed}"
        self._acked(chain, refs)
        return refs

    def _acked(self, chain: Chain, refs: list[PackRef]) -> None:
        self._say("acked", chain=chain, packs=[(ref.pack_id.hex(), ref.build.hex()) for ref in refs])
        self._chains.append(chain)

    def _put_sidecar(self, number: int, ref: PackRef) -> None:
        self._say("sidecar", number=number, acked=False)
        self._client.put_sidecar(SidecarKey(ref.pack_id, ref.build, SIDECAR_KIND), sidecar_of(number))
        self._say("sidecar", number=number, acked=True)

    def _check(self, chain: Chain, refs: list[PackRef]) -> None:
        assert len(refs) == len(chain), f"{len(refs)} packs found of chain {chain}"
        assert not self._reader.wrong_records(chain, refs), f"wrong bytes in chain {chain}"

    def _say(self, event: str, **fields: Any) -> None:
        line = {"event": event, "life": self._order["life"], "writer": self._index, "at_s": time.monotonic(), **fields}
        os.write(1, (json.dumps(line) + "\n").encode())


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for the process that reads us
    socket, broker = sys.argv[1:]
    for line in sys.stdin:
        for index in range(WRITERS):
            writer = Writer(json.loads(line), index)
            # A writer that waits for a dead daemon's answer ends at its own deadline; the next life need not wait.
            threading.Thread(target=writer.run, args=(socket, broker), daemon=True).start()


if __name__ == "__main__":
    main()
