"""How fast each window brings records to a GPU: one ticket of so many bytes, from its post to its arrival.

A model of one layer whose heads all fetch a whole set in every step, so that nothing else is under way meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from bench.decoder import Document
from bench.gpu_cells import Bench, phases_us
from bench.rivals import NotRun
from decode_worker import _native
from decode_worker.figures import Figure
from decode_worker.synthetic.checkpoint import B8, Shape
from decode_worker.synthetic.weights import DrawnCheckpoint
from kvstore_service.client import StoreError

SHAPE: Shape = B8 | {"num_hidden_layers": 1, "num_key_value_heads": 8, "hidden_size": 1024}
RECORD_BYTES = 512
HEADS = 8
SPARSENESS = 4  # a ticket takes at most one of so many records
ARRIVE = "arrive"
WARM_STEPS = 1  # the first compiles


def transfers(bench: Bench, windows: Sequence[str], volumes: Sequence[int], threads: Sequence[int]) -> Iterator[Figure]:
    """transfer_gbps.WINDOW.BYTES.THREADS beside the plain copy of the bus; threads: the daemon's copy threads."""
    checkpoint = DrawnCheckpoint.of(bench.directory / "transfer", SHAPE, seed=2)
    for count in threads:
        with _document(bench, checkpoint, max(volumes), count) as document:
            for window in windows:
                yield from _through(bench, document, window, volumes, count)


def _through(bench: Bench, document: Document, window: str, volumes: Sequence[int], threads: int) -> Iterator[Figure]:
    """A window that cannot be had is not tried again."""
    refused = ""
    for volume in volumes:
        name = f"transfer_gbps.{window}.{volume}.{threads}"
        if not refused:
            try:
                rate = _rate(bench, document, window, volume)
            except _native.RingError:
                raise
            except (NotRun, StoreError, ValueError, RuntimeError) as error:
                refused = f"{type(error).__name__}: {error}"
        if refused:
            yield Figure.not_run(name, refused)
        else:
            bus = bench.rates.bus_gbps
            yield Figure(name, rate, "GB/s", "plain copy", bus, rate / bus, bench.settings.few_steps)


@contextlib.contextmanager
def _document(bench: Bench, checkpoint: DrawnCheckpoint, largest: int, threads: int) -> Iterator[Document]:
    settings = bench.settings
    tokens = SPARSENESS * largest // (HEADS * RECORD_BYTES)
    document = Document(
        checkpoint, bench.directory / f"transfer-{threads}", -(-tokens // 256) * 256, alike=True,
        daemon_options=(f"--copy-threads={threads}", *settings.daemon_options),
        kernels=settings.kernels, staging_bytes=settings.staging_bytes, layer0="offloaded", graph="off",
    )  # fmt: skip
    document.require_room()
    with document:
        yield document


def _rate(bench: Bench, document: Document, window: str, volume: int) -> float:
    """GB/s. NotRun if the tickets were not of this volume."""
    records = volume // (HEADS * RECORD_BYTES)
    decoder = document.decoder("litecache", warm_steps=WARM_STEPS, window=window, budget=max(2, records))
    try:
        moved = decoder.run(1)["moved"]
        if moved != HEADS * records:
            raise NotRun(f"a ticket brought {moved:.0f} records, not {HEADS * records}")
        arrive_us = phases_us(decoder, bench.device, bench.settings.few_steps)[ARRIVE]
    finally:
        decoder.close()
    return volume / arrive_us / 1e3
