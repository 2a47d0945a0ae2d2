"""Each kernel beside the reference set, which computes in float64 on the host, on random heads of several shapes."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator

import numpy as np
import torch

from decode_worker import _native
from decode_worker.device import Device
from decode_worker.gpu.kernels.append import append
from decode_worker.gpu.kernels.attend import AttendScratch, attend
from decode_worker.gpu.sync import LATE
from decode_worker.kernels.state import HeadState
from tests.gpu.heads import Heads
from tests.gpu.ring import POISON, PretendRing
from tests.gpu.twins import LAYERS, Twins, look_up, reference_ticket, twins_over
from tests.gpu_check.report import Report
from tests.gpu_check.scene import SEED, Scene

TOLERANCE = {"float32": 5e-5, "bfloat16": 1e-4, "float16": 5e-5}  # of sums of numbers near 1
STEPS = 4
WAIT_US, SHORT_US = 10_000_000, 20_000
ANSWER_S = 0.02  # at most


def run(report: Report, scene: Scene) -> None:
    scale, rng = scene.scale, np.random.default_rng(SEED)
    for dtype in scale.dtypes:
        for group, d in scale.heads:
            shape = f"{dtype} {group}x{d}"
            with report.check(f"attend {shape}") as check:
                check.detail = f"at most {_attend(rng, scene.device, dtype, group, d):.1e} beside float64"
            with report.check(f"append {shape}"):
                _append(rng, scene.device, dtype, group, d)
    for preset in scale.presets:
        with report.check(f"decisions {preset}"):
            _decide(rng, scene.device, preset)
    with report.check("a ticket, answered while its kernel polls") as check:
        check.detail = f"{_over_a_ring(rng, scene.device)} tickets"
    with report.check("a ticket that nobody answers"):
        _late(rng, scene.device)


def _attend(rng: np.random.Generator, device: Device, dtype: str, group: int, d: int) -> float:
    """The largest difference, absolute or relative, whichever is less."""
    heads, where = Heads(rng, group=group, d=d, dtype=dtype), device.torch_device
    query, shape = 3 * heads.normal(heads.rows.count, 2 * group, d), heads.state.shape
    right = torch.empty_like(query), torch.empty(query.shape[:2])
    heads.reference().attend(1, query, *right)
    mine = torch.empty_like(query, device=where), torch.empty(query.shape[:2], device=where)
    scratch = AttendScratch(shape.slots, shape.heads, group, d, where)
    attend(
        _moved(heads.state, where), heads.rows.slot.to(where), heads.rows.position.to(where), 1, query.to(where), *mine,
        heads.words.to(where), heads.record_bytes, heads.context.scale, scratch,
    )  # fmt: skip
    device.wait()
    differences = []
    for a, b in zip(mine, right, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        finite = torch.isfinite(b)
        differences.append(float(((a.cpu() - b).abs() / b.abs().clamp(min=1))[finite].max()))
    return max(differences)


def _append(rng: np.random.Generator, device: Device, dtype: str, group: int, d: int) -> None:
    heads, where = Heads(rng, group=group, d=d, dtype=dtype), device.torch_device
    key, value = heads.normal(2, heads.rows.count, 2, d)
    expected = heads.reference(keeps_faults=True)
    expected.append(1, key, value)
    words, state = heads.words.to(where), _moved(heads.state, where)
    append(
        state, heads.rows.slot.to(where), heads.rows.position.to(where), 1, key.to(where), value.to(where), words,
        heads.record_bytes,
    )  # fmt: skip
    device.wait()
    assert torch.equal(words.view(torch.uint8).cpu(), expected.context.window), "the records differ"
    assert torch.equal(state.fault.cpu(), expected.context.state.fault), "the faults differ"


def _moved(state: HeadState, device: torch.device) -> HeadState:
    moved = copy.copy(state)
    for name, value in vars(state).items():
        if torch.is_tensor(value):
            setattr(moved, name, value.to(device))
    return moved


def _decide(rng: np.random.Generator, device: Device, preset: str) -> None:
    """Similarity, codes, selection, difference and commit: bit for bit, over hits, misses and failed runs."""
    twins = Twins(rng, preset, device=device, tau=rng.uniform(0.2, 0.9, (LAYERS, 2)).astype(np.float32))
    twins.bind(0, 768, 790)
    twins.bind(1, 256, 300)
    for number in range(STEPS):
        if number == 1:
            twins.grow(1)
        twins.step({1: 300 + number, 0: 790 + number}, failing=0.2)
        twins.turn(1.0)


@contextlib.contextmanager
def _ring(device: Device) -> Iterator[PretendRing]:
    ring = PretendRing()
    try:
        yield ring
    finally:
        device.close()
        ring.close()


def _over_a_ring(rng: np.random.Generator, device: Device) -> int:
    """What is posted is what the reference plans; what a thread of the host answers is committed."""
    with _ring(device) as ring:
        twins = twins_over(ring, rng, wait_us=WAIT_US, device=device, tau=np.full((LAYERS, 2), 0.7, np.float32))
        twins.bind(0, 768, 790)
        twins.bind(1, 256, 300)
        seq = 0
        for number in range(STEPS):
            twins.begin({0: 790 + number, 1: 300 + number})
            for layer in range(LAYERS):
                look_up(twins, layer)
                device.wait()
                right, timer = reference_ticket(twins, layer), None
                if right is not None:
                    seq += 1
                    ticket, _ = ring.take(seq)
                    assert (ticket.runs == right.runs).all(), "another ticket than the reference's"
                    assert ticket.pairs.tolist() == right.pairs.tolist(), "other pairs than the reference's"
                    statuses = twins.statuses(right, failing=0.2)
                    timer = threading.Timer(float(rng.uniform(0, ANSWER_S)), ring.answer, (seq, statuses))
                    timer.start()
                    twins.reference.kernels.commit(layer, statuses)
                twins.triton.kernels.await_ticket(layer)
                device.wait()
                if timer is not None:
                    timer.join()
                twins.compare()
            twins.turn(9.0)
        twins.triton.kernels.close()
        return seq


def _late(rng: np.random.Generator, device: Device) -> None:
    with _ring(device) as ring:
        twins = twins_over(ring, rng, wait_us=SHORT_US, device=device)
        twins.bind(0, 768, 790)
        twins.begin({0: 790})
        look_up(twins, 0)
        twins.triton.kernels.await_ticket(0)
        device.wait()
        try:
            twins.triton.kernels.raise_for_error()
        except _native.RingTimeout:
            pass
        else:
            raise AssertionError(f"error word {LATE.value} was expected")
        assert ring.own_words[POISON] == 2**64 - 1, "the ring is not poisoned"
        twins.triton.kernels.close()
