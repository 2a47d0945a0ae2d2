"""`triton`: the kernels for a GPU (decode_worker/gpu/kernels), which the interpreter of Triton runs on a CPU.

What a step does is launches and nothing else: none of its decisions is Python's. What the host must know of a step that
went wrong, `error` and `state.fault` hold; a whole step tells it with its tokens (decode_worker/gpu/ends.py), behind
others `raise_for_error` reads the former.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from decode_worker import _native
from decode_worker.gpu.ends import DeviceEnds
from decode_worker.gpu.errors import raise_for
from decode_worker.gpu.kernels import append, arrive, attend, gather, post, select
from decode_worker.gpu.kernels.begin import clear_faults
from decode_worker.gpu.kernels.delta import Delta, find_delta
from decode_worker.gpu.kernels.similarity import find_misses
from decode_worker.gpu.kernels.wishes import AUX, FIRST_PAIR, HEAD, PAIRS, SLOT, STATUS, Wishes
from decode_worker.gpu.requests import Requests, map_ring
from decode_worker.gpu.rows import DeviceRows
from decode_worker.kernels.base import Kernels, Rows, StepContext
from decode_worker.kernels.products.base import Products
from decode_worker.policy.plan import QueryKind, Ticket, gather_runs
from decode_worker.retrieval.hash import HashRetriever
from decode_worker.retrieval.view import StoredPack

STORAGE = {
    _native.DTYPE_FLOAT32: torch.float32, _native.DTYPE_BFLOAT16: torch.bfloat16, _native.DTYPE_FLOAT16: torch.float16
}  # fmt: skip
GATHER_PROGRAMS = 32


class TritonKernels(Kernels):
    """`hash` is the only retriever it selects with. Its scratch is allocated here, once; the state's tensors, the
    window and the ring are used where they lie."""

    gathers = True
    mixes = False
    looks_ahead = False

    def __init__(self, context: StepContext) -> None:
        super().__init__(context)
        state, device = context.state, context.state.parity.device
        shape = state.shape
        select.refuse_unknown(context.retriever, state)
        self._rows = DeviceRows.none(shape.slots, device)
        self._selects = (state.resident == 0).any(1).tolist()
        self._index = select.SlotIndex(state, context.settings.context, device)
        self._selection = select.Selection(state, self._index, device)
        self._delta = Delta(state, device)
        self._wishes = Wishes(shape.layers, shape.slots * shape.heads, device)
        self._projection = torch.empty(0, device=device)
        if isinstance(context.retriever, HashRetriever):
            self._projection = torch.from_numpy(context.retriever.projection.copy()).to(device)
        self._records = context.window.view(STORAGE[context.dtype])
        self._attend_scratch = attend.AttendScratch(shape.slots, shape.heads, shape.group, shape.head_dim, device)
        self._counted = [
            self._selection.claimed, self._selection.ended, self._delta.ended, self._wishes.begun, self._wishes.ended,
            self._attend_scratch.ended,
        ]  # fmt: skip
        self._error = torch.zeros(1, dtype=torch.int32, device=device)
        self._requests: Requests | None = None
        self._pull: gather.Pull | None = None
        if context.ring is not None:
            self._requests, cells = map_ring(context.ring, context.device, self._error)
            self._counted.append(self._requests.ended)
            if context.frames is not None:
                self._pull = gather.pull_from(context.frames, self._requests)
                self._counted.append(self._pull.ended)
            self._completions = arrive.Completions(
                cells, self._requests.own_poison, self._requests.peer_poison, self._error
            )

    def close(self) -> None:
        del self._records, self._requests, self._pull, self.context
        self.__dict__.pop("_completions", None)

    def extend(self, slot: int, pack: StoredPack) -> None:
        self._index.extend(slot, pack)

    def clear(self, slot: int) -> None:
        self._index.clear(slot)

    def ends(self, products: Products) -> DeviceEnds:
        return DeviceEnds(self.context, products, self._rows, self._counted, self._error)

    def begin(self, rows: Rows, step: int) -> None:
        mine = self._rows
        mine.count = rows.count
        mine.slots.copy_(rows.slot)
        mine.positions.copy_(rows.position)
        mine.step.fill_((step & 0xFFFFFFFF) - ((step & 0x80000000) << 1))
        torch._foreach_zero_(self._counted)  # as an interrupted launch of the interpreter would not leave them
        clear_faults(self.context.state, mine.slots, mine.count)

    def raise_for_error(self) -> None:
        word = int(self._error)
        if word:
            self._error.zero_()
        raise_for(word)

    # --- look_up ---

    def look_up(self, layer: int, query: torch.Tensor, kind: QueryKind) -> None:
        if not self._selects[layer]:
            return
        state = self.context.state
        self._choose(layer, query, kind, self._requests)
        if self._requests is not None:
            post.post(state, self._rows.count, self._rows.step, layer, self._delta, self._wishes, self._requests)

    def plan(self, layer: int, query: torch.Tensor, kind: QueryKind) -> Ticket | None:
        if not self._selects[layer]:
            return None
        self._choose(layer, query, kind, None)
        state = self.context.state
        wishes = self._wishes.wishes[layer, : int(self._wishes.count[layer])].cpu().numpy()
        if not len(wishes):
            return None
        slots, heads = wishes[:, SLOT].tolist(), wishes[:, HEAD].tolist()
        pairs = self._delta.pairs.cpu().numpy().view(np.uint32)
        runs, together = gather_runs(
            slots,
            state.epoch[slots].tolist(),
            state.issued[layer, slots, heads].tolist(),
            heads,
            [pairs[s * state.shape.heads + h, :n] for s, h, n in zip(slots, heads, wishes[:, PAIRS], strict=True)],
        )
        assert (runs["first_pair"] == wishes[:, FIRST_PAIR]).all()
        return Ticket(_native.OP_GATHER, layer, runs, together)

    def _choose(self, layer: int, query: torch.Tensor, kind: QueryKind, requests: Requests | None) -> None:
        context, rows, selection = self.context, self._rows, self._selection
        state, settings = context.state, context.settings
        row = (rows.slots, rows.positions, rows.count)
        find_misses(
            state, *row, layer, query, int(kind), settings.cos_floor, settings.reuse.by_label,
            self._projection, selection,
        )  # fmt: skip
        select.select(state, *row, layer, self._index, selection)
        find_delta(
            state, *row, rows.step, layer, query, int(kind), settings.cache, self._index, selection, self._delta,
            self._wishes, requests, context.wait_us * 1000,
        )  # fmt: skip

    # --- arrive ---

    def await_ticket(self, layer: int) -> None:
        self._await(layer, self.context.wait_us)

    def _await(self, layer: int, timeout_us: int) -> None:
        if self._posts(layer):
            arrive.await_ticket(self.context.state, layer, *self._ticket(timeout_us))
            self._gather(layer)

    def _posts(self, layer: int) -> bool:
        return self._requests is not None and self._selects[layer]

    def _ticket(self, timeout_us: int) -> tuple[Wishes, arrive.Completions, int, bool]:
        return self._wishes, self._completions, timeout_us * 1000, self.context.stale_fails

    def _gather(self, layer: int) -> None:
        context = self.context
        if context.landing is not context.window and self._requests is not None:
            gather.gather(
                context.state, layer, self._wishes, self._requests.pairs, self._pull, context.landing.view(torch.int32),
                context.window.view(torch.int32), context.record_bytes, GATHER_PROGRAMS,
            )  # fmt: skip

    def commit(self, layer: int, statuses: NDArray[np.uint32] | None) -> None:
        if statuses is not None:
            answers = torch.from_numpy(statuses.astype(np.int32))
            self._wishes.wishes[layer, : len(answers), STATUS] = answers[:, 0].to(self._wishes.wishes.device)
            self._wishes.wishes[layer, : len(answers), AUX] = answers[:, 1].to(self._wishes.wishes.device)
        arrive.commit(self.context.state, layer, self._wishes, statuses is not None, self.context.stale_fails)

    def arrive(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if not self._posts(layer):
            self.append(layer, key, value)
            return
        context = self.context
        arrive.arrive(
            context.state, self._rows.slots, self._rows.positions, layer, *self._ticket(context.wait_us), key, value,
            self._records, context.record_bytes,
        )  # fmt: skip
        self._gather(layer)

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        context = self.context
        append.append(
            context.state,
            self._rows.slots,
            self._rows.positions,
            layer,
            key,
            value,
            self._records,
            context.record_bytes,
        )

    def settle(self, timeout_us: int) -> None:
        for layer in range(self.context.state.shape.layers):
            self._await(layer, timeout_us)

    # --- attend ---

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        context, rows = self.context, self._rows
        attend.attend(
            context.state, rows.slots, rows.positions, layer, query, out, lse, self._records, context.record_bytes,
            context.scale, self._attend_scratch,
        )  # fmt: skip
