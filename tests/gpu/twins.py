"""Two kernel sets that are told the same, side by side: Triton's and the reference."""

from dataclasses import replace

import numpy as np
import torch

from decode_worker import _native
from decode_worker.device import Device, Host
from decode_worker.kernels.base import Kernels
from decode_worker.kernels.sets import KERNELS
from decode_worker.policy.plan import Ticket
from decode_worker.retrieval.hash import HashRetriever
from tests.qsac.pretend import HEAD_DIM, Bench, counted, settings

from .exact import multiples
from .ring import PretendRing

LAYERS, HEADS = 2, 2
WAIT_US = 2000
OK, ERROR = _native.STATUS_OK, _native.STATUS_ERROR
KEPT = (
    "held", "held_places", "held_count", "places", "count", "label", "label_kind", "cover", "generation", "parity",
    "issued", "stamp", "chosen", "missing", "fault", "counters",
)  # fmt: skip


class Twins:
    """Both have the same sessions; no record ever moves, a test says how a run ended. device: Triton's."""

    def __init__(self, rng: np.random.Generator, preset: str, device: Device | None = None, **changes) -> None:
        self.device = device or Host()
        resident = np.zeros((LAYERS, HEADS), bool)
        values = {"layers": LAYERS, "kv_heads": HEADS, "resident": resident, **changes}
        self.rng, self.settings = rng, settings(preset, **values)
        projection = multiples(rng.standard_normal((LAYERS, HEADS, HEAD_DIM, 256)), 16)
        retriever = HashRetriever(projection, np.zeros((LAYERS, HEADS, HEAD_DIM), np.float32))
        self.triton, self.reference = self.benches = tuple(
            Bench(kernels, self.settings, retriever, np.random.default_rng(0), on)
            for kernels, on in (("triton", self.device), ("reference", Host()))
        )
        self.query = self.noise(3.0)

    @property
    def kernels(self) -> tuple[Kernels, Kernels]:
        return self.triton.kernels, self.reference.kernels

    def bind(self, slot: int, stored: int, position: int) -> None:
        packs = [self.pack(first) for first in range(0, stored, 256)]
        for bench in self.benches:
            bench.bind(slot, stored, stored, list(packs))
            bench.positions[slot] = position
            bench.state.first_position[slot] = position

    def pack(self, first: int):
        return self.reference.pack(first, 256, self.rng.standard_normal((LAYERS, 256, HEADS, HEAD_DIM), np.float32))

    def grow(self, slot: int) -> None:
        pack = self.pack(int(self.reference.state.stored[slot]))
        for bench in self.benches:
            bench.packs[slot].append(pack)
            bench.policy.extend(slot, pack)

    def noise(self, scale: float) -> np.ndarray:
        shape = (LAYERS, self.settings.slots, HEADS * self.settings.group, HEAD_DIM)
        return scale * self.rng.standard_normal(shape)

    def turn(self, scale: float) -> None:
        """The next queries: some heads' stay what they were, others go elsewhere."""
        moves = self.rng.random((LAYERS, self.settings.slots, HEADS, 1)) < 0.5
        moved = np.where(np.repeat(moves, self.settings.group, 2), self.noise(scale), self.noise(0.05))
        self.query = self.query + moved

    def layer_query(self, layer: int) -> np.ndarray:
        return multiples(self.query[layer], 64)

    def begin(self, positions: dict[int, int]) -> None:
        for bench in self.benches:
            bench.begin(list(positions), list(positions.values()))

    def plan(self, layer: int) -> Ticket | None:
        """What both ask for."""
        mine, right = (bench.plan(layer, self.layer_query(layer)) for bench in self.benches)
        assert (mine is None) == (right is None)
        if mine is None or right is None:
            return None
        assert (mine.runs == right.runs).all()
        assert mine.pairs.tolist() == right.pairs.tolist()
        return right

    def statuses(self, ticket: Ticket, failing: float) -> np.ndarray:
        fails = self.rng.random(len(ticket.runs)) < failing
        return np.stack([np.where(fails, ERROR, OK), np.where(fails, self.rng.integers(0, 16), 0)], 1).astype(np.uint32)

    def compare(self) -> None:
        for name in KEPT:
            mine, right = (counted(bench.state, name) for bench in self.benches)
            different = torch.nonzero(mine != right)
            assert not len(different), (
                f"{name} at {different[0].tolist()}: {mine[*different[0]]}, not {right[*different[0]]}"
            )

    def step(self, positions: dict[int, int], failing: float = 0.0) -> None:
        self.begin(positions)
        for layer in range(LAYERS):
            ticket = self.plan(layer)
            if ticket is not None:
                statuses = self.statuses(ticket, failing)
                for kernels in self.kernels:
                    kernels.commit(layer, statuses)
            self.compare()


def twins_over(
    ring: PretendRing, rng: np.random.Generator, preset: str = "qsac", wait_us: int = WAIT_US, **changes
) -> Twins:
    """Its Triton set posts to a ring."""
    twins = Twins(rng, preset, **changes)
    bench = twins.triton
    bench.kernels = KERNELS["triton"](replace(bench.kernels.context, ring=ring.producer, wait_us=wait_us))
    bench.policy.tell(bench.kernels)
    return twins


def look_up(twins: Twins, layer: int) -> None:
    query = torch.from_numpy(twins.layer_query(layer)).to(twins.device.torch_device)
    twins.triton.kernels.look_up(layer, query, twins.triton.policy.query_kind(layer))


def reference_ticket(twins: Twins, layer: int):
    return twins.reference.plan(layer, twins.layer_query(layer))
