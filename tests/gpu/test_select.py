"""Similarity, codes and the counting select in Triton against the reference set's arithmetic, on random numbers.

Projections and queries are multiples of small powers of two, whose sums are exact in any order: a code has no bit that
depends on how a sum was rounded.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from decode_worker.gpu.kernels import encode, select
from decode_worker.gpu.kernels.similarity import find_misses
from decode_worker.kernels.reference import similarity
from decode_worker.kernels.state import HeadState
from decode_worker.policy.counters import Counters
from decode_worker.policy.plan import QueryKind
from decode_worker.policy.settings import PolicySettings
from decode_worker.retrieval.hash import HashRetriever
from decode_worker.retrieval.view import View
from tests.support.torch_calls import TorchCalls

from .exact import multiples

COS_FLOOR = 1e-3


def head_state(rng, **changes) -> HeadState:
    layers, heads, group = changes.get("layers", 2), changes.get("kv_heads", 2), changes.get("group", 4)
    resident = np.zeros((layers, heads), bool)
    resident[0, 0] = True
    values = {
        "slots": 3, "layers": layers, "kv_heads": heads, "group": group, "head_dim": 16, "record_bytes": 128,
        "context": 2048, "tau": rng.uniform(-0.5, 0.9, (layers, heads)).astype(np.float32),
        "weights": rng.random((layers, heads, group), dtype=np.float32), "resident": resident, "recent": 16,
        "tail": 400, "budget": 64,
    }  # fmt: skip
    return HeadState(PolicySettings(**{**values, **changes}))


def made_selection(state: HeadState) -> select.Selection:
    device = torch.device("cpu")
    return select.Selection(state, select.SlotIndex(state, 2048, device), device)


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Rows:
    """Every slot with a set in use, at a position of its own; the last row is padding."""

    def __init__(self, rng, state: HeadState) -> None:
        shape = state.shape
        self.slots = int32([*rng.permutation(shape.slots - 1), -1])
        self.positions = int32(rng.integers(900, 1400, shape.slots))
        state.stored[:] = 768
        state.parity[:] = torch.from_numpy(rng.integers(0, 2, state.parity.shape)).to(torch.uint8)
        state.cover[:] = torch.from_numpy(rng.integers(500, 1000, state.cover.shape)).int()
        state.label_kind[:] = torch.from_numpy(rng.integers(0, 3, state.label_kind.shape)).to(torch.int8)
        self.query = rng.standard_normal((shape.slots, shape.heads, shape.group, shape.head_dim), dtype=np.float32)
        for row, slot in enumerate(self.slots[:-1]):
            noise = rng.choice([0.1, 1.0, 3.0], (2, shape.layers, shape.heads, 1, 1))
            near = self.query[row] + noise * rng.standard_normal(noise.shape[:3] + self.query.shape[2:])
            state.label[:, :, slot] = torch.from_numpy(near).float()


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("by_label", [True, False])
def test_a_head_misses_when_the_reference_says_so(rng, group, by_label):
    state = head_state(rng, group=group, kv_heads=5)
    rows = Rows(rng, state)
    state.weights[1, 1] = 0  # the least cosine counts
    state.label[:, 1, :, 2, 0] = 0  # a norm of zero is a miss
    rows.query[0, 3, 0] *= -1  # a cosine that is not positive
    state.tau[1, 2], state.tau[1, 1] = -1, 0.1
    state.first_position[rows.slots[0]] = rows.positions[0]
    selection = made_selection(state)
    selection.misses[:], selection.histogram[:] = 7, 1
    query = torch.from_numpy(rows.query).reshape(3, 5 * group, 16)
    find_misses(
        state, rows.slots, rows.positions, 3, 1, query, QueryKind.SPECULATIVE, COS_FLOOR, by_label,
        torch.zeros(2, 5, 16, 256), selection,
    )  # fmt: skip
    lookups = hits = forced = 0
    for lane, missed in enumerate(selection.misses.tolist()):
        row, head = divmod(lane, 5)
        slot, position = int(rows.slots[row]), int(rows.positions[row])
        if slot < 0:
            assert missed == 0
            continue
        at = state.side(1, slot, head)
        sim = similarity(torch.from_numpy(rows.query[row, head]), state.label[at], state.weights[1, head], COS_FLOOR)
        near = by_label and int(state.label_kind[at]) == QueryKind.SPECULATIVE and sim > float(state.tau[1, head])
        cover = int(state.cover[at])
        must = position - cover >= int(state.forced_from[1, head]) and state.limit(slot, position) > cover
        assert missed == (not near or must), (row, head, sim)
        assert selection.histogram[lane].any() == (not missed)
        if row != 0:
            lookups, hits, forced = lookups + 1, hits + (near and not must), forced + must
    counted = Counters.of(state.counters.tolist())
    assert (counted.lookups, counted.hits, counted.forced) == (lookups, hits, forced)


def test_a_resident_head_and_a_row_with_a_fault_select_nothing(rng):
    state = head_state(rng)
    rows = Rows(rng, state)
    state.fault[rows.slots[1]] = 15
    selection = made_selection(state)
    selection.misses[:] = 7
    query, projection = torch.from_numpy(rows.query).reshape(3, 8, 16), torch.zeros(2, 2, 16, 256)
    find_misses(state, rows.slots, rows.positions, 3, 0, query, QueryKind.TRUE, COS_FLOOR, False, projection, selection)
    assert selection.misses.tolist() == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(("group", "d"), [(1, 16), (4, 40), (5, 128), (8, 64)])
def test_folded_codes_give_hamming_distances(rng, group, d):
    state = head_state(rng, group=group, head_dim=d, record_bytes=-(-8 * d // 64) * 64)
    rows, selection = Rows(rng, state), made_selection(state)
    projection = multiples(rng.standard_normal((2, 2, d, 256)), 16)
    retriever = HashRetriever(projection, np.zeros((2, 2, d), np.float32))
    query = multiples(rows.query.reshape(3, 2 * group, d), 64)
    state.tau[1], state.forced_from[1] = torch.tensor([2, -2]), 10**6
    state.label[:], state.label_kind[:] = 1, QueryKind.TRUE
    selection.codes.zero_()
    find_misses(
        state, rows.slots, rows.positions, 3, 1, torch.from_numpy(query), QueryKind.TRUE, COS_FLOOR, True,
        torch.from_numpy(projection), selection,
    )  # fmt: skip
    codes = selection.codes.view(3, 2, 1 + encode.planes(group), 8)
    assert not codes[:, 1].any(), "a head that hits is not encoded"
    keys = rng.integers(0, 1 << 64, (50, 4), dtype=np.uint64)
    for row, head in ((0, 0), (1, 0)):
        own = retriever.query_codes(1, head, query[row, head * group : (head + 1) * group])
        distance = np.bitwise_count(keys[:, None] ^ own).sum((1, 2)).astype(int)
        majority, *masks = codes[row, head].numpy().view(np.uint32)
        differing = keys.view(np.uint32) ^ majority
        folded = sum(np.bitwise_count(differing & mask).sum(1).astype(int) << b for b, mask in enumerate(masks))
        paid = distance - (folded << encode.shift(group))
        assert len(set(paid)) == 1, "what every key pays"
        assert folded.max() < encode.distances(group)


def pack(rng, first: int, tokens: int, layers: int, heads: int, bits: int) -> SimpleNamespace:
    """Few bits that differ, so that many distances are the same."""
    order = np.array([[rng.permutation(tokens) for _ in range(heads)] for _ in range(layers)]).astype(np.uint16)
    codes = rng.integers(0, 1 << bits, (layers, heads, tokens, 4), dtype=np.uint64)
    return SimpleNamespace(
        first_token=first, tokens=tokens, order=order, index=SimpleNamespace(data=codes, tokens=tokens)
    )


class Selecting:
    """Random packs, the selection's tensors, and the retriever that says what is right."""

    def __init__(self, rng, unit: int, group: int, bits: int) -> None:
        self.state = head_state(rng, group=group, unit=unit, budget=600, slack=0)
        self.rows = Rows(rng, self.state)
        self.index = select.SlotIndex(self.state, 2048, torch.device("cpu"))
        self.selection = select.Selection(self.state, self.index, torch.device("cpu"))
        self.projection = multiples(rng.standard_normal((2, 2, 16, 256)), 16)
        self.retriever = HashRetriever(self.projection, np.zeros((2, 2, 16), np.float32))
        self.query = multiples(self.rows.query.reshape(3, 2 * group, 16), 64)
        self.views = [View(), View()]
        self.rng, self.bits = rng, bits

    def extend(self, slot: int, tokens: int) -> None:
        new = pack(self.rng, self.views[slot].stored, tokens, 2, 2, self.bits)
        self.views[slot].extend(new)
        self.index.extend(slot, new)
        self.state.stored[slot] = self.views[slot].stored

    def check(self) -> None:
        state, s, shape = self.state, self.selection, self.state.shape
        row = (self.rows.slots, self.rows.positions, 3)
        find_misses(
            state, *row, 1, torch.from_numpy(self.query), QueryKind.TRUE, COS_FLOOR, False,
            torch.from_numpy(self.projection), s,
        )  # fmt: skip
        s.misses[2] = 0
        select.select(state, *row, 1, self.index, s)
        assert not s.claimed.any(), "the next launch claims from 0"
        assert not s.ended.any()
        for lane in (0, 1, 3):
            slot, position = int(self.rows.slots[lane // 2]), int(self.rows.positions[lane // 2])
            queries = self.query[lane // 2].reshape(2, shape.group, 16)[lane % 2]
            right = self.retriever.select(
                1, lane % 2, self.views[slot], queries, shape.sink, state.limit(slot, position),
                int(state.selected[1, slot, lane % 2]), shape.unit,
            )  # fmt: skip
            assert s.wanted[lane, : int(s.wanted_count[lane])].tolist() == right.tolist()


@pytest.mark.parametrize(("unit", "group"), [(1, 1), (1, 4), (8, 3), (2, 8)])
@pytest.mark.parametrize("bits", [1, 64])
def test_the_best_units_ascending_and_of_ties_the_lower_ones(rng, monkeypatch, unit, group, bits):
    monkeypatch.setattr(select, "BLOCK", 256)
    selecting = Selecting(rng, unit, group, bits)
    state, rows = selecting.state, selecting.rows
    for tokens in (256, 512, 40 * unit % 256 or 256):
        for slot in (0, 1):
            selecting.extend(slot, tokens)
        state.selected[:] = torch.from_numpy(rng.integers(1, 600 // unit, state.selected.shape)).int()
        rows.positions[:] = torch.from_numpy(rng.integers(10, int(state.stored[0]) + 300, 3)).int()
        selecting.check()
    state.selected[:] = 1  # the best one alone
    selecting.check()
    rows.positions[:] = 3  # nothing may be selected
    selecting.check()


def test_a_slot_that_is_cleared_and_filled_again_knows_nothing_of_its_former_packs(rng):
    selecting = Selecting(rng, 1, 2, 64)
    for slot in (0, 1):
        selecting.extend(slot, 1024)
    selecting.index.clear(0)
    assert (selecting.index.sink_records[:, 0] == -1).all()
    selecting.views[0] = View()
    selecting.extend(0, 256)
    selecting.state.selected[:] = 100
    selecting.check()
    tokens = selecting.views[0].tokens_of(1, 1)
    records = selecting.index.sink_records[selecting.index.head[1, 1], 0]
    assert tokens[records.numpy()].tolist() == [0, 1, 2, 3]


def test_a_pack_is_copied_once_however_many_heads_select(rng):
    asked = []
    for layers, heads in ((1, 2), (3, 4)):
        state = head_state(rng, layers=layers, kv_heads=heads)
        index = select.SlotIndex(state, 2048, torch.device("cpu"))
        packs = [pack(rng, first, 256, layers, heads, 4) for first in (0, 256)]
        with TorchCalls() as calls:
            for each in packs:
                index.extend(1, each)
        asked.append(calls.names)
        for layer, head in state.resident.logical_not().nonzero().tolist():
            number = int(index.head[layer, head])
            tokens = index.tokens[number, 1, :512].tolist()
            assert tokens == [each.first_token + int(t) for each in packs for t in each.order[layer, head]]
            sinks = index.sink_records[number, 1].tolist()
            assert [tokens[record] for record in sinks] == list(range(len(sinks)))
            codes = index.codes[number, 1, :, :512].T.numpy()
            assert (codes == np.concatenate([each.index.data[layer, head].view(np.int32) for each in packs])).all()
    assert asked[0] == asked[1]


def test_more_tokens_than_a_session_may_have_are_refused(rng):
    selecting = Selecting(rng, 1, 2, 64)
    selecting.extend(0, 2048)
    with pytest.raises(ValueError, match="slot 0: 2304 stored tokens"):
        selecting.extend(0, 256)
