"""Launches whose programs depend on each other, run in any order: the same state and the same tickets."""

import numpy as np
import pytest
import torch

from decode_worker import _native
from decode_worker.gpu.kernels import delta, post, select
from decode_worker.gpu.kernels.attend import PART, AttendScratch, attend
from decode_worker.gpu.launch import recorded
from decode_worker.policy.counters import Counters
from tests.qsac.pretend import HEAD_DIM

from .heads import Heads
from .interleave import interleaved
from .ring import PretendRing
from .twins import LAYERS, look_up, reference_ticket, twins_over


@pytest.mark.parametrize("preset", ["qsac", "lru"])
def test_a_step_is_the_reference_s_whatever_the_order_of_programs(rng, monkeypatch, preset):
    monkeypatch.setattr(select, "BLOCK", 256)
    monkeypatch.setattr(delta, "CHUNK", 64)
    monkeypatch.setattr(post, "CHUNK", 16)
    ring = PretendRing()
    twins = twins_over(ring, rng, preset, tau=np.full((LAYERS, 2), 0.7, np.float32))
    twins.bind(0, 768, 790)
    twins.bind(1, 256, 300)
    seq = 0
    with interleaved(int(rng.integers(2**31))) as ran:
        for number in range(3):
            twins.begin({0: 790 + number, 1: 300 + number})
            for layer in range(LAYERS):
                look_up(twins, layer)
                right = reference_ticket(twins, layer)
                if right is not None:
                    seq += 1
                    ticket, _ = ring.take(seq)
                    assert (ticket.runs == right.runs).all()
                    assert ticket.pairs.tolist() == right.pairs.tolist()
                    statuses = twins.statuses(right, failing=0.2)
                    ring.answer(seq, statuses)
                    twins.reference.kernels.commit(layer, statuses)
                twins.triton.kernels.await_ticket(layer)
                twins.compare()
            twins.turn(9.0)
    ring.close()
    assert {"select", "delta", "post"} <= set(ran)


def test_attention_has_the_same_bits_whatever_the_order_of_programs(rng):
    heads = Heads(rng, slots=2, heads=2, group=2, d=16, context=3 * PART, resident_share=1)
    query, shape = heads.normal(2, 4, 16), heads.state.shape
    heads.rows.set([0, 1], [3 * PART - 1, PART + 7])
    scratch = AttendScratch(shape.slots, shape.heads, shape.group, shape.head_dim, torch.device("cpu"))
    scratch.programs = 5
    results = []

    def attended() -> None:
        scratch.out[:] = torch.nan
        out, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:2], torch.nan)
        attend(
            heads.state, heads.rows.slot, heads.rows.position, 0, query, out, lse, heads.words, heads.record_bytes,
            heads.context.scale, scratch,
        )  # fmt: skip
        results.append((out, lse))

    attended()
    for seed in rng.integers(2**31, size=3).tolist():
        with interleaved(seed):
            attended()
        assert not scratch.ended.any()
        assert torch.equal(results[-1][0], results[0][0])
        assert torch.equal(results[-1][1], results[0][1])


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_token_is_appended_behind_the_commit_whatever_the_order_of_programs(rng, layer):
    """Tails are full until what arrives covers more, but for one head's: that row has a fault."""
    for seed in rng.integers(2**31, size=3).tolist():
        ring = PretendRing()
        twins = twins_over(ring, rng, "qsac")
        twins.bind(0, 512, 530)
        twins.bind(1, 256, 300)
        twins.begin({0: 530, 1: 300})
        look_up(twins, layer)
        right = reference_ticket(twins, layer)
        assert right is not None
        statuses = twins.statuses(right, failing=0)
        ring.answer(1, statuses)
        for bench in twins.benches:
            state = bench.state
            cover, side = state.cover[:, layer], torch.arange(2).view(2, 1, 1)
            cover.copy_(torch.where(state.parity[layer] == side, -(10**6), cover))
            cover[:, 1, 1] = -(10**6)
        key, value = (torch.from_numpy(rng.standard_normal((2, 2, HEAD_DIM), np.float32)) for _ in range(2))
        twins.reference.kernels.commit(layer, statuses)
        twins.reference.kernels.append(layer, key, value)
        with interleaved(seed) as ran:
            twins.triton.kernels.arrive(layer, key, value)
        twins.compare()
        assert twins.reference.state.fault.tolist()[:2] == [0, _native.FAULT_TAIL_FULL]
        mine, theirs = (bench.kernels.context.window for bench in twins.benches)
        assert torch.equal(mine, theirs)
        assert ran == ["arrive"]
        ring.close()


def test_a_layer_is_at_most_six_launches(rng):
    ring = PretendRing()
    twins = twins_over(ring, rng, "qsac")
    twins.bind(0, 512, 530)
    twins.begin({0: 530})
    kernels, state = twins.triton.kernels, twins.triton.state
    query = torch.from_numpy(twins.layer_query(1))
    key, value = (torch.from_numpy(rng.standard_normal((1, 2, HEAD_DIM), np.float32)) for _ in range(2))
    with recorded() as launches:
        look_up(twins, 1)
        ring.answer(1, twins.statuses(ring.take(1)[0], failing=0))
        kernels.arrive(1, key, value)
        kernels.attend(1, query[:1], torch.empty_like(query[:1]), torch.empty(1, query.shape[1]))
    assert [launch.name for launch in launches] == ["_similarity", "_select", "_delta", "_post", "_arrive", "_attend"]
    assert Counters.of(state.counters.tolist()).records_moved > 0
    ring.close()
