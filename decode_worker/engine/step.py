"""One decode step (docs/architecture.md, docs/qsac.md): the loop that everything else serves.

A step is a straight line of launches over fixed tensors. Nothing in it depends on what they hold: which heads miss, and
what for, is decided inside the kernels. So the line of so many rows is made once, and a step runs it.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from decode_worker import _native
from decode_worker.engine.graphs import Graphs
from decode_worker.failures import INTERRUPTED_S
from decode_worker.kernels.base import Kernels, Rows
from decode_worker.kernels.ends import Row
from decode_worker.kernels.products.base import Products
from decode_worker.policy.base import Policy, TailFull
from decode_worker.policy.plan import QueryKind
from decode_worker.transport import Transport, fault_of
from decode_worker.work import Pieces
from kvstore_service.client import StoreError

TRACED_LAYERS_MAX = 4096
INTERRUPTED_US = int(INTERRUPTED_S * 1e6)
STEP_MASK = 0x7FFFFFFF  # of the number that tickets carry


@dataclass(frozen=True)
class Launch:
    """One call of a step. `phase`: what its time counts as."""

    phase: str
    layer: int
    call: Callable[..., None]
    arguments: tuple[Any, ...]


class DecodeLoop:
    """Runs steps of up to `slots` sessions over one policy's window. Not thread-safe.

    `trace` keeps the latest (step, layer, start_ns, end_ns) of each layer's computation, CLOCK_MONOTONIC.
    """

    def __init__(
        self,
        policy: Policy,
        products: Products,
        transport: Transport,
        kernels: Kernels,
        graphs: Graphs | None = None,
        layerwise: bool = False,
    ) -> None:
        """graphs: steps are padded to the next power of two rows and replayed. layerwise: the host waits for the device
        before each layer's `arrive`, as LiteCache's rival does (figure 7a)."""
        self.kernels = kernels
        self._graphs = graphs
        self._layerwise = layerwise
        policy.tell(kernels)
        self._policy = policy
        self._products = products
        self._ends = kernels.ends(products)
        self._transport = transport
        self._device = kernels.context.device
        self._layers = policy.settings.layers
        self._rows = Rows(policy.settings.slots)
        self._lse = torch.empty_like(products.query[..., 0])
        self._lines: dict[int, list[Launch]] = {}
        self.steps = 0
        self.spent_ns: Counter[str] = Counter()  # phase -> ns
        self.trace: deque[tuple[int, int, int, int]] = deque(maxlen=TRACED_LAYERS_MAX)

    def close(self) -> None:
        """Lets go of the window."""
        self._lines.clear()
        if self._graphs is not None:
            self._graphs.clear()
        self.kernels.close()

    def step(
        self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]
    ) -> tuple[torch.Tensor, list[Exception | None]]:
        """Processes one token of each slot. Returns logits float32 [B, vocab] and each row's fault, if it has one: its
        logits mean nothing then, the others are not concerned, and the same token may be tried again.

        A row's fault is a StoreError (DATA_LOSS: a stored block failed its checksum) or TailFull. Raises what concerns
        all of them: RingTimeout (the daemon is gone), and from then on RingPoisoned; RuntimeError for a device that
        has failed.
        """
        faults = self._step([Row(*row) for row in zip(slots, tokens, positions, strict=True)])
        return self._products.logits[: len(slots)].to("cpu", copy=True), faults

    def advance(self, wanted: Sequence[Row]) -> tuple[list[int | None], list[Exception | None]]:
        """The same, with what each row goes on with instead of its logits; None where they are not numbers."""
        faults = self._step(wanted)
        return self._ends.tokens(), faults

    def _step(self, wanted: Sequence[Row]) -> list[Exception | None]:
        self._transport.require_alive()
        rows = len(wanted) if self._graphs is None else _padded(len(wanted), len(self._rows.slot))
        self._policy.seen = None
        self._ends.place(wanted, rows, self.steps & STEP_MASK)
        with self._posting():
            try:
                self._carry_out(rows)
                codes = self._ends.read()
            except BaseException as error:
                self._ends.settle(self._transport.wait_us * 1e-6 if isinstance(error, Exception) else INTERRUPTED_S)
                raise
        self._policy.seen = self._ends.seen()
        self.steps += 1
        return [self._fault(code) for code in codes]

    @contextlib.contextmanager
    def _posting(self) -> Iterator[None]:
        """Transport.steps. What the kernels say of a step that was given up is nobody's: not the next one's either."""
        try:
            with self._transport.steps():
                yield
        except BaseException:
            with contextlib.suppress(RuntimeError, StoreError):
                if self._device.idle():
                    self.kernels.raise_for_error()
            raise

    def seed(self, slot: int, position: int, queries: Sequence[torch.Tensor]) -> Pieces[None]:
        """First sets and labels of a slot, from the queries [Hq, d] of the last prompt token, one per layer, each made
        from the layer before's input (but for layer 0); position: the first step's. A layer is a piece, which leaves
        nothing under way: steps of other slots may lie between two."""
        for layer, query in enumerate(queries):
            if self._policy.selects(layer):
                self._seed(slot, position, [(layer, query, QueryKind.SPECULATIVE if layer else QueryKind.TRUE)])
                yield None

    def relabel(self, slot: int, position: int, labels: Sequence[torch.Tensor]) -> None:
        """The same from the labels [Hq, d] of an earlier session, one per layer. All layers' records travel at once."""
        policy = self._policy
        self._seed(slot, position, [
            (layer, label, policy.query_kind(layer)) for layer, label in enumerate(labels) if policy.selects(layer)
        ])  # fmt: skip

    def _seed(self, slot: int, position: int, queries: Sequence[tuple[int, torch.Tensor, QueryKind]]) -> None:
        self._transport.require_alive()
        self._begin(slot, position)
        kernels = self.kernels
        with self._posting():
            self._run([
                *(
                    Launch("look_up", layer, kernels.look_up, (layer, query.float().contiguous(), kind))
                    for layer, query, kind in queries
                ),
                *(Launch("arrive", layer, kernels.await_ticket, (layer,)) for layer, _, _ in queries),
            ])  # fmt: skip
            self._device.wait()
        kernels.raise_for_error()
        self._require_no_fault(slot)

    def remember(self, slot: int, position: int, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Writes one token to its places: per layer K, V [1, H, d]."""
        self._begin(slot, position)
        for layer, (key, value) in enumerate(layers):
            self.kernels.append(layer, key.float().contiguous(), value.float().contiguous())
        self._require_no_fault(slot)

    def line(self, rows: int) -> list[Launch]:
        """All launches of a step of so many rows, in order."""
        if rows not in self._lines:
            self._lines[rows] = list(self._launches(rows))
        return self._lines[rows]

    def _launches(self, rows: int) -> Iterator[Launch]:
        products, kernels, lookahead = self._products, self.kernels, self.kernels.context.lookahead
        query, next_query, key, value, attention = (
            tensor[:rows]
            for tensor in (products.query, products.next_query, products.key, products.value, products.attention)
        )
        lse = self._lse[:rows]
        for call in self._ends.first:
            yield Launch("begin", 0, call, (rows,))
        yield Launch("products", 0, products.embed, (rows,))
        for layer in range(self._layers):
            ahead = layer + 1 < self._layers and self._selects_by(layer + 1, QueryKind.SPECULATIVE)
            yield Launch("products", layer, products.layer, (layer, rows, ahead))
            if ahead:
                yield from self._look_up(layer, layer + 1, next_query, QueryKind.SPECULATIVE)
            if self._selects_by(layer, QueryKind.TRUE):
                yield from self._look_up(layer, layer, query, QueryKind.TRUE)
            if lookahead.layer and layer + 2 < self._layers and self._selects_by(layer + 2, QueryKind.SPECULATIVE):
                yield Launch("look_ahead", layer, products.peek, (layer + 2, rows))
                yield Launch("look_ahead", layer, kernels.look_ahead, (layer + 2, next_query))
            yield Launch("arrive", layer, kernels.arrive, (layer, key, value))
            yield Launch("attend", layer, kernels.attend, (layer, query, attention, lse))
        yield Launch("products", self._layers, products.finish, (rows,))
        for call in self._ends.last:
            yield Launch("choose", self._layers, call, (rows,))

    def _look_up(self, at: int, layer: int, query: torch.Tensor, kind: QueryKind) -> Iterator[Launch]:
        """Hints come behind the ticket of the same heads."""
        yield Launch("look_up", at, self.kernels.look_up, (layer, query, kind))
        if self.kernels.context.lookahead.steps:
            yield Launch("look_ahead", at, self.kernels.look_ahead, (layer, query))

    def _selects_by(self, layer: int, kind: QueryKind) -> bool:
        return self._policy.selects(layer) and self._policy.query_kind(layer) == kind

    def _carry_out(self, rows: int) -> None:
        for i, part in enumerate(self._parts(self.line(rows))):
            if self._graphs is None:
                self._run(part)
            else:
                self._graphs.run((rows, i), partial(self._run, part))
            if self._layerwise:
                self._device.wait()

    def _parts(self, line: Sequence[Launch]) -> list[Sequence[Launch]]:
        """What runs without a look of the host: all, unless `layerwise`."""
        if not self._layerwise:
            return [line]
        cuts = [0, *(i for i, launch in enumerate(line) if launch.phase == "arrive"), len(line)]
        return [line[first:end] for first, end in pairwise(cuts)]

    def _run(self, line: Sequence[Launch]) -> None:
        clock, spent = time.monotonic_ns, self.spent_ns
        started = before = clock()
        try:
            for launch in line:
                launch.call(*launch.arguments)
                now = clock()
                spent[launch.phase] += now - before
                if launch.phase == "attend":
                    self.trace.append((self.steps, launch.layer, started, now))
                    started = now
                before = now
        except BaseException as error:
            if self._graphs is None or not self._graphs.capturing:  # then nothing was posted
                self.kernels.settle(self._transport.wait_us if isinstance(error, Exception) else INTERRUPTED_US)
            raise

    def _begin(self, slot: int, position: int) -> None:
        """Of what is no whole step."""
        self._policy.seen = None
        self._rows.set([slot], [position])
        self.kernels.begin(self._rows, self.steps & STEP_MASK)

    def _require_no_fault(self, slot: int) -> None:
        fault = self._fault(int(self._policy.state.fault[slot]))
        if fault is not None:
            raise fault

    def _fault(self, code: int) -> StoreError | TailFull | None:
        if code == _native.FAULT_TAIL_FULL:
            tail = self._policy.settings.tail
            return TailFull(f"a tail of {tail} tokens is full of tokens that no pack holds; raise tail")
        return fault_of(code) if code else None


def _padded(rows: int, most: int) -> int:
    """A graph for every number of rows would be many graphs."""
    return min(1 << (rows - 1).bit_length(), most)
