"""Whether what the daemon delivers is what kernels find: lines that it is asked for like records (PROBE in
csrc/core/ring.h), waited for as in a step, and compared in a launch of their own, where attention would read them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from decode_worker import _native
from decode_worker.device import Device
from decode_worker.policy.plan import NO_PAIRS, RUN_DTYPE
from decode_worker.window.base import Window, WindowError

ROUNDS = 4
LINES = 256  # of a round
WAIT_US_MAX = 10_000_000


@dataclass(frozen=True)
class Probe:
    """Lines [first, first + count) of a window, of this seed."""

    seed: int
    first: int
    count: int

    @property
    def part(self) -> slice:
        """Its bytes."""
        return slice(self.first * _native.PROBE_BYTES, (self.first + self.count) * _native.PROBE_BYTES)

    def run(self) -> np.ndarray:
        run = np.zeros(1, RUN_DTYPE)
        run["generation"], run["arg"], run["pair_count"] = self.seed, self.part.start, self.count
        return run

    def check(self, status: int, fault: int, wrong: int) -> None:
        """WindowError unless its run ended OK, and no word of it was `wrong`."""
        where = f"bytes {self.part.start} to {self.part.stop - 1}"
        if status != _native.STATUS_OK and fault == _native.FAULT_INTERNAL:
            raise WindowError(f"the daemon cannot read back what it has delivered to {where}")
        if status != _native.STATUS_OK:
            name = _native.FAULT_NAMES.get(fault, f"status {status}")
            raise WindowError(f"the daemon does not deliver to {where}: {name}")
        if wrong:
            words = self.count * _native.PROBE_BYTES // 4
            raise WindowError(
                f"kernels see {wrong} of {words} words at {where} otherwise than the daemon delivers them"
            )


def probes(size_bytes: int) -> list[Probe]:
    """From the first to the last line of a window, each time with another seed; none if it holds no line."""
    lines = size_bytes // _native.PROBE_BYTES
    count = min(LINES, lines)
    if not count:
        return []
    return [Probe(0x9E3779B9 * (i + 1) % 2**32, (lines - count) * i // (ROUNDS - 1), count) for i in range(ROUNDS)]


def try_window(window: Window, device: Device, ring: _native.RingProducer, wait_us: int) -> None:
    """WindowError unless what the daemon delivers is what kernels of the device find. Afterwards the parts that were
    delivered to are zero, and nothing of the ring is under way.

    ring: of the steps where the device posts by itself, else any. wait_us: of one answer."""
    asked = probes(len(window.tensor))
    wait_us = min(wait_us, WAIT_US_MAX)
    try:
        if device.wakes:
            _ask_from_host(window, ring, asked, wait_us)
        elif asked:
            from decode_worker.gpu.kernels.probe import ask  # where there is a device there is Triton

            ask(window, device, ring, asked, wait_us)
    except _native.RingTimeout:
        raise WindowError(f"the daemon has not answered within {wait_us // 1000} ms what was asked of it") from None
    for probe in asked:
        window.landing[probe.part] = 0
        window.tensor[probe.part] = 0
    device.wait()


def _ask_from_host(window: Window, ring: _native.RingProducer, asked: list[Probe], wait_us: int) -> None:
    for probe in asked:
        seq = ring.post(_native.OP_PROBE, 0, 0, probe.run(), NO_PAIRS, wait_us)
        ((status, fault),) = ring.wait(seq, wait_us).tolist()
        window.take(probe.part.start, probe.part.stop - probe.part.start)
        seen = window.tensor[probe.part].view(torch.int32).numpy().view(np.uint32)
        expected = _native.probe_lines(probe.seed, probe.first, probe.count).reshape(-1)
        probe.check(status, fault, int(np.count_nonzero(seen != expected)))
