"""Kills a real daemon under mixed load and checks it against a memory that lies outside of it.

    with Crasher(daemon, seed, counts) as crasher:
        while counts.kills < 50:
            crasher.kill()
        crasher.check_all()

The load (tests/crash/load.py) tells this process of every acknowledgement. Each `kill` is one SIGKILL at a random
moment, a restart over the same data, and then: what was acknowledged is found and right in every record; a commit that
was under way is there whole or not at all; what was given up stays away; no file lies on disk without its row.
"""

import contextlib
import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvstore_service.client import AdminClient, PackRef, SidecarKey, StoreClient, StoreError
from kvstore_service.client.private import PrivateDaemon
from tests.crash.load import SIDECAR_KIND, WRITERS, Chain, Reader, sidecar_of
from tests.support.world import LANES, LAYERS, TOKENS

ROOT = Path(__file__).parents[2]
ANSWER_S = 60.0  # for whatever the load or the daemon must do at all
CALM_S = 0.25  # of load before a kill, at most
OLD_CHAINS = 6  # that are looked at again after each kill, and that the load goes on with
# What a worker may meet when its daemon is killed; anything else, or anything before the kill, is a failure.
DEATHS = {"UNAVAILABLE", "UNAUTHENTICATED", "RingTimeout", "RingPoisoned"}

Event = dict[str, Any]


class Lost(AssertionError):
    """Something acknowledged is not there any more."""


class WrongBytes(AssertionError):
    """The store served bytes that nobody wrote at this address."""


@dataclass
class Counts:
    """`kills_before_commit`: a pack was reserved and its commit not answered yet. `restarts_s`: from the kill until a
    worker is registered and its first lookup answered."""

    kills: int = 0
    kills_before_commit: int = 0
    packs_acknowledged: int = 0
    records_verified: int = 0
    lost: int = 0
    wrong_bytes: int = 0
    other_failures: int = 0
    restarts_s: list[float] = field(default_factory=list)


class Load:
    """The process of tests/crash/load.py."""

    def __init__(self, daemon: PrivateDaemon) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.load", daemon.socket, daemon.broker],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=ROOT,
        )  # fmt: skip
        self._events: queue.Queue[Event | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def begin(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")

    def next_event(self, deadline_s: float) -> Event | None:
        """None at the deadline (monotonic)."""
        try:
            event = self._events.get(timeout=max(deadline_s - time.monotonic(), 0.0))
        except queue.Empty:
            return None
        assert event is not None, f"the load ended by itself, status {self._process.wait(ANSWER_S)}"
        return event

    def close(self) -> None:
        self._process.kill()
        self._process.wait(ANSWER_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed under us
            for line in self._process.stdout:
                self._events.put(json.loads(line))
        self._events.put(None)


class Memory:
    """What the daemon has acknowledged. A pack goes by its chain: the numbers of all packs from token 0 up to it."""

    def __init__(self) -> None:
        self.packs: dict[Chain, tuple[str, str]] = {}  # -> (pack id, build), in hex
        self.gone: set[Chain] = set()
        self.sidecars: dict[int, bool] = {}  # number -> acknowledged; until then it may be there or not
        self.open: dict[tuple[int, int], tuple[Chain, int, dict[str, float]]] = {}  # (life, writer) -> under way

    def hear(self, event: Event) -> int:
        """Returns how many packs were acknowledged by this."""
        who = (event["life"], event["writer"])
        if event["event"] == "reserved":
            self.open[who] = (tuple(event["chain"]), event["have"], {"reserved": event["at_s"]})
        elif event["event"] == "sending" and who in self.open:
            self.open[who][2]["sending"] = event["at_s"]
        elif event["event"] == "aborted":
            self.open.pop(who, None)
            self.gone.add(tuple(event["chain"])[: event["have"] + 1])
        elif event["event"] == "sidecar":
            self.sidecars[event["number"]] = event["acked"]
        elif event["event"] == "acked":
            self.open.pop(who, None)
            return self.remember(tuple(event["chain"]), [(name, build) for name, build in event["packs"]])
        return 0

    def remember(self, chain: Chain, packs: list[tuple[str, str]]) -> int:
        """These are durable from now on. Returns how many of them are news."""
        known = len(self.packs)
        for end, pack in enumerate(packs, 1):
            if chain[:end] in self.gone:
                raise Lost(f"chain {chain[:end]} was acknowledged and is not stored")
            if self.packs.setdefault(chain[:end], pack) != pack:
                raise WrongBytes(f"chain {chain[:end]} was {self.packs[chain[:end]]} and is {pack}")
        return len(self.packs) - known

    def whole_chains(self, chains: set[Chain] | None = None) -> list[Chain]:
        """Those that no other one continues, sorted: between them they hold every pack of `chains` (default: all)."""
        chains = set(self.packs) if chains is None else chains
        return sorted(chains - {chain[:-1] for chain in chains})


class Crasher:
    """A daemon that is not started yet, its load, and the memory. Every failed check is counted and raised, with the
    seed in the error's notes."""

    def __init__(self, daemon: PrivateDaemon, seed: int, counts: Counts) -> None:
        self.counts = counts
        self.memory = Memory()
        self._seed = seed
        self._random = random.Random(seed)
        self._daemon = daemon
        self._life = 0
        self._killed_s: dict[int, float] = {}
        self._spans_s = {aim: deque([0.01], maxlen=64) for aim in ("reserved", "sending")}  # from then to the answer
        self._fresh: set[Chain] = set()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self._daemon.close)
            self._daemon.start()
            self._load = Load(self._daemon)
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._load.close()
        self._daemon.close()

    def kill(self) -> None:
        """One life of the load, its daemon's death, the restart, and the checks."""
        with self._judging():
            self._begin()
            self._run_until_the_moment()
            self._killed_s[self._life] = time.monotonic()
            self._daemon.kill()
            self._daemon.start()
            with self._reader() as reader:
                reader.find(next(iter(self.memory.packs), (0,)))
                restart_s = time.monotonic() - self._killed_s[self._life]
                self._listen(0.0)
                under_way = any(life == self._life for life, _ in self.memory.open)
                self._check_disk()
                self._settle(reader)
                self._check_some(reader)
            self.counts.kills += 1
            self.counts.kills_before_commit += under_way
            self.counts.restarts_s.append(restart_s)

    def check_all(self) -> None:
        """Every pack, every byte on disk, and a clean end."""
        with self._judging():
            with self._reader() as reader:
                for chain in self.memory.whole_chains():
                    self._check_chain(reader, chain)
                for chain in self.memory.gone:
                    self._check_gone(reader, chain)
            with AdminClient.connect(self._daemon.socket, self._daemon.broker, timeout_s=ANSWER_S) as admin:
                bad = [answer for answer in admin.verify() if answer.error or answer.bad_blocks]
                if bad:
                    raise WrongBytes(f"{len(bad)} packs are damaged: {bad[:3]}")
                stored = {(pack.pack_id.hex(), pack.build.hex()) for pack in admin.list_packs()}
                assert stored == set(self.memory.packs.values()), "other packs are stored than those remembered"
            assert self._daemon.stop() == 0
            assert os.listdir(self._daemon.run_dir) == ["kvstored.log"]

    @contextlib.contextmanager
    def _judging(self) -> Any:
        """Counts a failure and says how to repeat it."""
        try:
            yield
        except Exception as error:
            self.counts.lost += isinstance(error, Lost)
            self.counts.wrong_bytes += isinstance(error, WrongBytes)
            self.counts.other_failures += not isinstance(error, Lost | WrongBytes)
            error.add_note(f"seed {self._seed}, life {self._life}, data in {self._daemon.data_dir}")
            error.add_note(self._daemon.log_tail())
            raise

    @contextlib.contextmanager
    def _reader(self) -> Any:
        with (
            StoreClient.connect(self._daemon.socket, self._daemon.broker, "crasher", ANSWER_S) as client,
            contextlib.closing(Reader(client)) as reader,
        ):
            yield reader

    # the load

    def _begin(self) -> None:
        self._life += 1
        chains = self._sample(self.memory.whole_chains())
        self._load.begin(life=self._life, seed=self._random.getrandbits(32), chains=chains)
        for _ in range(WRITERS):
            assert self._listen(ANSWER_S, "ready"), "the load did not come up"

    def _run_until_the_moment(self) -> None:
        """Returns at a random moment; half of the time between a reservation and the answer of its commit."""
        self._listen(self._random.uniform(0, CALM_S))
        if self.counts.kills_before_commit * 2 <= self.counts.kills:
            aim = self._random.choice(list(self._spans_s))
            assert self._listen(ANSWER_S, aim), f"the load said nothing of {aim!r}"
            time.sleep(self._random.random() * self._random.choice(self._spans_s[aim]))

    def _listen(self, seconds: float, until: str = "") -> bool:
        """Hears what the load says, up to the first event of this life called `until`. False: time is up."""
        deadline_s = time.monotonic() + seconds
        while (event := self._load.next_event(deadline_s)) is not None:
            self._hear(event)
            if event["event"] == until and event["life"] == self._life:
                return True
        return False

    def _hear(self, event: Event) -> None:
        if event["event"] == "ended":
            killed_s = self._killed_s.get(event["life"], float("inf"))
            expected = event["error"] in DEATHS and event["at_s"] >= killed_s
            assert expected, f"the load failed: {event['text']}"
        if event["event"] == "acked":
            chain = tuple(event["chain"])
            _, _, since_s = self.memory.open.get((event["life"], event["writer"]), (chain, 0, {}))
            for aim, from_s in since_s.items():
                self._spans_s[aim].append(event["at_s"] - from_s)
            self._fresh.add(chain)
        self.counts.packs_acknowledged += self.memory.hear(event)

    # checks

    def _settle(self, reader: Reader) -> None:
        """A commit that nobody answered is there whole, and then stays, or not at all, and then never comes."""
        for chain, have, _ in self.memory.open.values():
            found = reader.find(chain)
            if len(found) < have:
                raise Lost(f"chain {chain[:have]} was acknowledged; {len(found)} of its packs are found")
            assert len(found) in (have, len(chain)), f"half a commit: {len(found)} packs of {chain} from {have}"
            if len(found) > have:
                self.memory.remember(chain, [_hex(ref) for ref in found])
                self._fresh.add(chain)
            else:
                self.memory.gone.add(chain[: have + 1])
                self._check_gone(reader, chain)
        self.memory.open.clear()

    def _check_some(self, reader: Reader) -> None:
        """All that is new since the last kill, and some of the old."""
        for chain in self.memory.whole_chains(self._fresh) + self._sample(self.memory.whole_chains()):
            self._check_chain(reader, chain)
        for chain in self._sample(sorted(self.memory.gone)):
            self._check_gone(reader, chain)
        self._fresh.clear()

    def _check_chain(self, reader: Reader, chain: Chain) -> None:
        found = reader.find(chain)
        wanted = [self.memory.packs[chain[:end]] for end in range(1, len(chain) + 1)]
        if [_hex(ref) for ref in found] != wanted:
            raise Lost(f"chain {chain} is acknowledged as {wanted} and found as {[_hex(ref) for ref in found]}")
        try:
            wrong = reader.wrong_records(chain, found)
        except StoreError as error:
            raise Lost(f"chain {chain}: {error}") from error
        if wrong:
            raise WrongBytes(f"{wrong} wrong records in chain {chain}")
        self.counts.records_verified += len(chain) * LAYERS * LANES * TOKENS
        for number, ref in zip(chain, found, strict=True):
            if number in self.memory.sidecars:
                self._check_sidecar(reader, number, ref)

    def _check_sidecar(self, reader: Reader, number: int, ref: PackRef) -> None:
        content = reader.client.get_sidecar(SidecarKey(ref.pack_id, ref.build, SIDECAR_KIND))
        if content is None and self.memory.sidecars[number]:
            raise Lost(f"the sidecar of pack {number} was acknowledged and is not stored")
        if content not in (None, sidecar_of(number)):
            raise WrongBytes(f"the sidecar of pack {number} has another content")

    def _check_gone(self, reader: Reader, chain: Chain) -> None:
        assert len(reader.find(chain)) < len(chain), f"chain {chain} was given up and is served"

    def _check_disk(self) -> None:
        """Rows and files are the same packs and sidecars; nothing but our reader lives in the daemon or beside it."""
        with AdminClient.connect(self._daemon.socket, self._daemon.broker, timeout_s=ANSWER_S) as admin:
            status = admin.get_status()
        files = {name: list((self._daemon.data_dir / name).iterdir()) for name in ("packs", "sidecars")}
        held = {
            "packs": len(files["packs"]),
            "stored_bytes": sum(path.stat().st_size for paths in files.values() for path in paths),
            **dict.fromkeys(("packs_damaged", "uploads_open", "uploads_reserved", "sessions", "bound_slots"), 0),
            "workers": 1,
            "rings": 2,
        }
        counted = {name: status.counters[name] for name in held}
        if counted["packs_damaged"]:
            raise Lost(f"{counted['packs_damaged']} packs are damaged")
        assert counted == held, f"the daemon holds {counted}, the disk and one worker say {held}"
        sockets = {"store.sock", "broker.sock"}
        assert set(os.listdir(self._daemon.run_dir)) == {
            *sockets,
            *(f"{name}.lock" for name in sockets),
            "kvstored.log",
        }
        assert not [name for name in os.listdir("/dev/shm") if "kvstore" in name or "headgate" in name]

    def _sample(self, chains: list[Chain]) -> list[Chain]:
        return self._random.sample(chains, min(OLD_CHAINS, len(chains)))


def _hex(ref: PackRef) -> tuple[str, str]:
    return ref.pack_id.hex(), ref.build.hex()
