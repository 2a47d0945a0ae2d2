"""What does a worker feel of its neighbours? Against the same worker alone in the same run, and against the bounds.

One copy thread. A victim that does ordinary things shares the daemon with an attacker in a process of its own, which
does what a worker may do: tickets of many runs, 64 busy rings, RANGEs from the disk, binding anew with thousands of
runs under way, memory that it only declares. Each repeat measures the victim alone (the attacker is paused) and
attacked.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.document import counters, scratch
from bench.neighbour import (
    BULK_RECORDS,
    DAEMON_OPTIONS,
    LANES,
    PLACES,
    RECORD_BYTES,
    SMALL,
    SPARSE,
    Attacker,
    Document,
    Neighbour,
    NeighbourError,
)
from decode_worker.figures import Figure, print_json, print_table
from kvstore_service.client import RingGeometry
from kvstore_service.client.private import DAEMON_ARGV, PrivateDaemon

HOT_P99_US_MAX = 1000
SHARE_MIN = 0.45
COLD_READ_MS_MAX = 20
UNBIND_MS_MAX = 20
RANGE_SHARE_MIN = 0.5
EXCESS_MIB_MAX = 32

DRAM_BYTES = 256 << 20
SMALL_DRAM_BYTES = 8 << 20
STOP_S = 3.0
EXTENT_RECORDS = 32  # of 512 B, in 4 blocks of 4 KiB
VICTIM_RUNS, VICTIM_PAIRS, VICTIM_IN_FLIGHT = 4, 1024, 8
SLOW_DISK_US = 20_000
SETTLE_S_MAX = 30
MIB = 1 << 20

ROOT = Path(__file__).parents[1]
SHIM = ROOT / "build" / "shim" / "kvstore_service"


@dataclass(frozen=True)
class Settings:
    """How much is measured. The defaults end within three minutes whatever the daemon does."""

    repeats: int = 3
    seconds: float = 1.0  # of each measurement of a rate or a percentile
    rounds: int = 1500  # of one-record tickets, at most
    bulk_passes: int = 3  # 192 MiB parts of the attacker's document: more than the DRAM tier holds
    cold_reads: int = 8
    unbinds: int = 8
    range_mib: int = 128  # so that the smallest run still is a whole extent
    attack_s: float = 3.0  # how long memory is watched


HOT = Document("hot", 4096)
COLD = Document("cold", 65536)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.isolation", description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = measure()
    print_json(figures) if arguments.json else print_table("A worker beside its neighbours", figures)
    return 0


def measure(settings: Settings = Settings()) -> list[Figure]:
    bulk = Document("bulk", settings.bulk_passes * BULK_RECORDS)
    figures = []
    with _daemon(DRAM_BYTES) as daemon, Neighbour(daemon, HOT, SMALL) as victim:
        figures += _hot_p99(daemon, victim, settings, bulk)
        figures += _victim_share(daemon, victim, settings)
        figures += _unbind(daemon, victim, settings)
        with Neighbour(daemon, COLD, SMALL) as reader:
            figures += _cold_read(daemon, reader, settings, bulk)
    figures += _slow_disk(settings, bulk)
    figures += _range_gbps(settings)
    figures += [_rss_excess(name, attack, settings) for name, attack in MEMORY_ATTACKS.items()]
    return figures


def _hot_p99(daemon: PrivateDaemon, victim: Neighbour, settings: Settings, bulk: Document) -> list[Figure]:
    figures, everywhere = [], []
    flood, cold, rebinding = ("flood", _flooded()), ("bulk", bulk), ("rebind", bulk)
    for name, (attack, document) in (("flood", flood), ("cold_neighbour", cold), ("rebinding_neighbour", rebinding)):
        alone, attacked = _paired(daemon, attack, document, settings, lambda: _p99_us(victim, settings))
        everywhere += alone
        figures += _bounded(f"hot_p99_us.{name}", attacked, "us", HOT_P99_US_MAX, alone)
    return [*_bounded("hot_p99_us.alone", everywhere, "us", HOT_P99_US_MAX), *figures]


def _slow_disk(settings: Settings, bulk: Document) -> list[Figure]:
    """Every read of the neighbour's takes 20 ms longer. Needs the test build whose disk calls can be delayed."""
    modules = list(SHIM.glob("_native*.so"))
    folders = (ROOT / "csrc" / name for name in ("core", "store", "shim"))
    sources = max(path.stat().st_mtime for folder in folders for path in folder.iterdir())
    if not modules or modules[0].stat().st_mtime < sources:
        print(
            "bench.isolation: hot_p99_us.slow_disk is left out: no fresh build with HEADGATE_IO_SHIM under build/shim; "
            "`pytest tests/isolation` makes one",
            file=sys.stderr,
        )
        return []
    argv = (sys.executable, "-m", "tests.support.faulty_daemon", f"--native={modules[0]}")
    with _daemon(DRAM_BYTES, argv) as daemon, Neighbour(daemon, HOT, SMALL) as victim:
        alone = [_p99_us(victim, settings) for _ in range(settings.repeats)]
        daemon.send_line(f'[["gather", "delay", 1, {1 << 40}, {SLOW_DISK_US}]]')
        if (answer := daemon.read_line()) != "ok":
            raise NeighbourError(f"the test build refuses a delay: {answer}")
        with Attacker(daemon, "bulk", bulk):
            attacked = [_p99_us(victim, settings) for _ in range(settings.repeats)]
        return [Figure.of_runs("hot_p99_us.slow_disk", attacked, "us", "alone", alone)]


def _victim_share(daemon: PrivateDaemon, victim: Neighbour, settings: Settings) -> list[Figure]:
    ticket = victim.gather(np.arange(VICTIM_PAIRS), VICTIM_RUNS)
    figures = []
    for name, attack in (("one_ring", "busy_1"), ("8_rings", "busy_8"), ("64_rings", "busy_64")):
        alone, attacked = _paired(
            daemon, attack, HOT, settings, lambda: victim.stream(ticket, settings.seconds, VICTIM_IN_FLIGHT)
        )
        shares = [ours / rate for ours, rate in zip(attacked, alone, strict=True)]
        figures += _bounded(f"victim_share.{name}", shares, "of its tickets/s alone", SHARE_MIN, least=True)
    return figures


def _unbind(daemon: PrivateDaemon, victim: Neighbour, settings: Settings) -> list[Figure]:
    def unbind_ms() -> float:
        times_ms = []
        for _ in range(settings.unbinds):
            times_ms.append(_ms(victim.unbind))
            victim.bind()
        return float(np.median(times_ms))

    alone, attacked = _paired(daemon, "flood", _flooded(), settings, unbind_ms)
    return _bounded("unbind_ms.flood", attacked, "ms", UNBIND_MS_MAX, alone)


def _cold_read(daemon: PrivateDaemon, reader: Neighbour, settings: Settings, bulk: Document) -> list[Figure]:
    """Each read is the first of its extent."""
    extents = iter(np.random.default_rng(0).permutation(COLD.tokens // EXTENT_RECORDS))

    def read_ms() -> float:
        tickets = (reader.gather([int(next(extents)) * EXTENT_RECORDS]) for _ in range(settings.cold_reads))
        times_ms = []
        for ticket in tickets:
            times_ms.append(_ms(lambda ticket=ticket: reader.fetch(ticket)))
            time.sleep(0.005)
        return float(np.median(times_ms))

    alone, attacked = _paired(daemon, "bulk", bulk, settings, read_ms)
    return _bounded("cold_read_ms.behind_range", attacked, "ms", COLD_READ_MS_MAX, alone)


def _range_gbps(settings: Settings) -> list[Figure]:
    """One RANGE ticket over the same bytes, in 256 and in 8,192 runs, with a DRAM tier that holds an eighth of them."""
    records = settings.range_mib * MIB // (LANES * RECORD_BYTES)
    document = Document("range", records)
    rates: dict[int, list[float]] = {256: [], 8192: []}
    with _daemon(SMALL_DRAM_BYTES) as daemon, Neighbour(daemon, document, RingGeometry(2, 8192, 1)) as reader:
        for runs in list(rates) * (settings.repeats if settings.repeats < 3 else 2):
            seconds = _ms(lambda runs=runs: reader.fetch(reader.range(0, records, runs))) / 1000
            rates[runs].append(settings.range_mib * MIB / 1e9 / seconds)
    shares = [many / few for many, few in zip(rates[8192], rates[256], strict=True)]
    return [
        Figure.of_runs("range_gbps.8192_runs", rates[8192], "GB/s", "256 runs", rates[256]),
        *_bounded("range_gbps.8192_runs.share", shares, "of that at 256", RANGE_SHARE_MIN, least=True),
    ]


# --- memory ---


def _sparse_ring(daemon: PrivateDaemon) -> Iterator[None]:
    """Sixteen tickets of one pair each, at the end of a ring of which nothing else was ever touched."""
    with Neighbour(daemon, HOT, SPARSE) as neighbour:
        for seq in range(1, SPARSE.tickets + 1):
            neighbour.write_ticket(seq, SPARSE.pairs_max - 1, (0, 0))
        yield


def _posts(attack: str, document: Document) -> Callable[[PrivateDaemon], Iterator[None]]:
    def carried_out(daemon: PrivateDaemon) -> Iterator[None]:
        with Attacker(daemon, attack, document):
            yield

    return carried_out


MEMORY_ATTACKS = {
    "sparse_ring": _sparse_ring,
    "cold_ticket": _posts("cold_ticket", COLD),
    "many_runs": _posts("many_runs", Document("flooded", PLACES)),
}


def _rss_excess(name: str, attack: Callable[[PrivateDaemon], Iterator[None]], settings: Settings) -> Figure:
    """Most MiB of private memory that the daemon took while it was attacked, and of shared memory beyond the declared.

    A daemon that does not end afterwards is killed."""
    with _daemon(SMALL_DRAM_BYTES) as daemon:
        for document in (COLD, Document("flooded", PLACES)):
            with Neighbour(daemon, document, SMALL) as neighbour:
                neighbour.fetch(neighbour.range(0, PLACES, 16))  # the DRAM tier is full
        before = private_mib(daemon.pid)
        peak = before
        with contextlib.contextmanager(attack)(daemon):
            end_s = time.monotonic() + settings.attack_s
            while time.monotonic() < end_s:
                peak = max(peak, private_mib(daemon.pid))
                time.sleep(0.02)
    (figure, *_) = _bounded(f"rss_excess_mib.{name}", [peak - before], "MiB", EXCESS_MIB_MAX)
    return figure


def private_mib(pid: int) -> float:
    """RssAnon of a process. What its workers declare is shared memory; anonymous is what it takes for itself."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise NeighbourError(f"/proc/{pid}/status does not tell RssAnon")


# --- how it is measured ---


@contextlib.contextmanager
def _daemon(dram_bytes: int, argv: Sequence[str] = DAEMON_ARGV) -> Iterator[PrivateDaemon]:
    with (
        scratch() as directory,
        PrivateDaemon(directory, dram_bytes, options=DAEMON_OPTIONS, argv=argv, stop_s=STOP_S) as daemon,
    ):
        yield daemon


def _flooded() -> Document:
    """What a flood asks for: its FLOOD_PAIRS records."""
    return Document("flooded", PLACES)


def _paired(
    daemon: PrivateDaemon, attack: str, document: Document, settings: Settings, measured: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """`measured` alone and under the attack, in turns."""
    alone, attacked = [], []
    with Attacker(daemon, attack, document) as attacker:
        for _ in range(settings.repeats):
            attacker.pause()
            _settle(daemon)
            alone.append(measured())
            attacker.resume()
            attacked.append(measured())
    return alone, attacked


def _settle(daemon: PrivateDaemon) -> None:
    """Returns when nothing that was posted is under way any more."""
    deadline_s = time.monotonic() + SETTLE_S_MAX
    before: dict[str, int] = {}
    while True:
        now = counters(daemon)
        ended = now["runs_ok"] + now["runs_error"] + now["runs_stale"]
        if now["runs"] == ended and before and now["tickets"] == before["tickets"]:
            return
        if time.monotonic() > deadline_s:
            raise NeighbourError(f"tickets are still served {SETTLE_S_MAX} s after the last one was posted")
        before = now
        time.sleep(0.05)


def _p99_us(victim: Neighbour, settings: Settings) -> float:
    """Of one-record tickets, from post to answer, half a millisecond after one another."""
    ticket = victim.gather([5])
    times_us: list[float] = []
    end_s = time.perf_counter() + settings.seconds
    while len(times_us) < settings.rounds and time.perf_counter() < end_s:
        times_us.append(1000 * _ms(lambda: victim.fetch(ticket)))
        time.sleep(0.0005)
    return float(np.percentile(times_us, 99))


def _ms(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started_s)


def _bounded(
    name: str,
    values: Sequence[float],
    unit: str,
    bound: float,
    alone: Sequence[float] | None = None,
    *,
    least: bool = False,
) -> list[Figure]:
    """The figure beside its bound and, where there is one, beside the victim alone."""
    beside_bound = Figure.of_runs(
        name, values, unit, f"bound (at {'least' if least else 'most'})", [bound] * len(values)
    )
    return [beside_bound] if alone is None else [Figure.of_runs(name, values, unit, "alone", alone), beside_bound]


if __name__ == "__main__":
    sys.exit(main())
