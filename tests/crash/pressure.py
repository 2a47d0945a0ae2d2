"""Writes twice as much as the store may hold, for a long time: python -m tests.crash.pressure [--minutes M] [--seed S]

Workers write, find, attach and read chains out of a universe twice as large as `nvme_bytes`, so that the daemon evicts
all the time, within a quota as well. Some chains are pinned. Nothing may be refused, nothing pinned may go, and what is
found is right in every record. What was counted is added to bench/results/reliability.json. Exit status 1 if not so.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore_service.client import AdminClient, PackRef, StoreClient, StoreError
from tests.crash.load import Chain, Reader
from tests.support.daemon_process import Daemon
from tests.support.reliability import add_run
from tests.support.world import LAYOUT, TOKENS, reservation

PACK_BYTES = 286_720  # of a pack of tests.support.world
HELD_PACKS = 48
CHAINS = HELD_PACKS  # of two packs each: twice what fits
PINNED = 4
WORKERS = 3
PENDING_S = 20.0  # that another worker may take to write a pack


@dataclass
class Counts:
    packs_written: int = 0
    packs_evicted: int = 0
    chains_found: int = 0
    records_verified: int = 0
    refusals: int = 0
    pinned_lost: int = 0
    wrong_bytes: int = 0
    other_failures: int = 0


@dataclass
class Pressure:
    """`failures`: what ended a worker, with its trace."""

    daemon: Daemon
    seed: int
    counts: Counts = field(default_factory=Counts)
    failures: list[str] = field(default_factory=list)

    def run(self, ends_s: float) -> None:
        """Until then (monotonic)."""
        with AdminClient.connect(self.daemon.socket, self.daemon.broker) as admin:
            admin.set_quota(f"uid-{os.getuid()}", int(0.9 * HELD_PACKS * PACK_BYTES))
            pinned = [chain_of(number) for number in range(PINNED)]
            with StoreClient.connect(self.daemon.socket, self.daemon.broker, "pinner") as client:
                pinner = Worker(client, self.counts)
                for chain in pinned:
                    admin.pin([ref.pack_id for ref in pinner.visit(chain)])
                pinner.close()
            threads = [threading.Thread(target=self._work, args=(index, ends_s)) for index in range(WORKERS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(ends_s - time.monotonic() + 120.0)
                assert not thread.is_alive(), "a worker hangs"
            self.look_at_pinned(pinned)
            self.counts.packs_evicted = admin.get_status().counters["packs_evicted_room"]
            self.failures += [f"audit: {check.name}: {check.detail}" for check in admin.audit() if not check.ok]
        self.counts.other_failures += len(self.failures)

    def look_at_pinned(self, pinned: Sequence[Chain]) -> None:
        with StoreClient.connect(self.daemon.socket, self.daemon.broker, "looker") as client:
            reader = Reader(client)
            for chain in pinned:
                refs = reader.find(chain)
                self.counts.pinned_lost += len(chain) - len(refs)
                self.counts.wrong_bytes += reader.wrong_records(chain, refs)
            reader.close()

    def _work(self, index: int, ends_s: float) -> None:
        chooser = random.Random(f"{self.seed} {index}")
        try:
            with StoreClient.connect(self.daemon.socket, self.daemon.broker, f"pressure-{index}") as client:
                worker = Worker(client, self.counts)
                while time.monotonic() < ends_s:
                    worker.visit(chain_of(chooser.randrange(CHAINS)))
                worker.close()
        except StoreError as error:
            if error.code == "RESOURCE_EXHAUSTED":
                self.counts.refusals += 1
            self.failures.append(traceback.format_exc())
        except BaseException:
            self.failures.append(traceback.format_exc())


class Worker:
    """Finds or writes a chain, then reads all of it while it is attached."""

    def __init__(self, client: StoreClient, counts: Counts) -> None:
        self._client = client
        self._reader = Reader(client)
        self._counts = counts

    def close(self) -> None:
        self._reader.close()

    def visit(self, chain: Chain) -> list[PackRef]:
        refs = self._reader.find(chain)
        self._counts.chains_found += len(refs) == len(chain)
        deadline_s = time.monotonic() + PENDING_S
        while len(refs) < len(chain):
            assert time.monotonic() < deadline_s, f"chain {chain} is being written for {PENDING_S} s"
            refs = self._write(chain, refs)
        wrong = self._reader.wrong_records(chain, refs)
        self._counts.wrong_bytes += wrong
        self._counts.records_verified += len(chain) * TOKENS
        assert not wrong, f"{wrong} wrong records in chain {chain}"
        return refs

    def _write(self, chain: Chain, have: list[PackRef]) -> list[PackRef]:
        """The chain as far as it is stored afterwards; others may be writing it too."""
        session = self._client.open_session(LAYOUT, len(chain) * TOKENS)
        parent = have[-1].pack_id if have else b""
        wanted = [reservation(n, i, parent if i == len(have) else b"") for i, n in enumerate(chain) if i >= len(have)]
        reserved = self._client.reserve_pack(session, wanted)
        mine = []
        for item, number in zip(reserved, chain[len(have) :], strict=True):
            if item.retry_after_s is not None:
                break
            if item.upload_id is not None:
                self._reader.worker.store(item.upload_id, number)
                mine.append(item.upload_id)
        for result in self._client.commit_pack(session, mine) if mine else []:
            if result.error is not None:
                raise result.error
        self._counts.packs_written += len(mine)
        left = [item.upload_id for item in reserved if item.upload_id is not None and item.upload_id not in mine]
        self._client.abort_pack(left)
        waits_s = [item.retry_after_s for item in reserved if item.retry_after_s is not None]
        if waits_s:
            time.sleep(max(waits_s))
        refs = self._reader.find(chain)
        self._client.close_session(session)
        return refs


def chain_of(number: int) -> Chain:
    return (2 * number + 1, 2 * number + 2)


def daemon_options() -> tuple[str, ...]:
    return (f"--nvme-bytes={HELD_PACKS * PACK_BYTES}", "--copy-threads=1")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.pressure", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    arguments = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell started us with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    print(f"evicting for {arguments.minutes:g} min, seed {arguments.seed}", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="headgate-pressure-"))
    with Daemon(directory, options=daemon_options()) as daemon:
        pressure = Pressure(daemon, arguments.seed)
        pressure.run(time.monotonic() + arguments.minutes * 60.0)
    print(pressure.counts, *pressure.failures, sep="\n", flush=True)
    add_run("eviction_pressure", minutes=arguments.minutes, seed=arguments.seed, **vars(pressure.counts))
    counts = pressure.counts
    if counts.refusals or counts.pinned_lost or counts.wrong_bytes or counts.other_failures:
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
