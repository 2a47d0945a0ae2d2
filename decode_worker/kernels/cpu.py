"""`cpu`: the kernels in C++ (csrc/cpu/step.h)."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import to_dlpack

from decode_worker import _native
from decode_worker.kernels.base import Kernels, Rows, StepContext
from decode_worker.kernels.ends import HostEnds
from decode_worker.kernels.products.base import Products
from decode_worker.policy.plan import RUN_DTYPE, Op, QueryKind, Ticket
from decode_worker.retrieval.base import Retriever
from decode_worker.retrieval.hash import HashRetriever
from decode_worker.retrieval.view import StoredPack, View


class CpuKernels(Kernels):
    """`hash` selects in C++; any other retriever is asked in Python, head by head.

    Tensors go as capsules: `Tensor.__dlpack__`, which nanobind would call, is Python. It takes ten times as long, and
    an interrupt that comes in it is lost: nanobind takes it for a refusal and asks again."""

    shares = True

    def __init__(self, context: StepContext) -> None:
        super().__init__(context)
        settings, retriever = context.settings, context.retriever
        self._hashes = isinstance(retriever, HashRetriever)
        self._views = [View() for _ in range(settings.slots)]
        self._step = _native.Step(
            context.state,
            partial(_select, retriever, self._views),  # not a method: Step would hold its own holder
            retriever.projection if isinstance(retriever, HashRetriever) else None,
            [] if context.ring is None else [context.ring, *context.more_rings],
            context.window.numpy(),
            reuses=settings.reuse.by_label,
            keeps=settings.cache.keeps,
            whole=settings.cache.whole,
            stamp=int(settings.cache.stamp),
            cos_floor=settings.cos_floor,
            kinds=[(kind.dtype, kind.record_bytes) for kind in context.kinds],
            scale=context.scale,
            threads=context.threads,
            stale_fails=context.stale_fails,
            wait_us=context.wait_us,
            ahead_steps=context.lookahead.steps,
            ahead_records_max=context.hinted_records_max,
        )

    def close(self) -> None:
        del self._step, self.context

    def extend(self, slot: int, pack: StoredPack) -> None:
        self._views[slot].extend(pack)
        self._step.extend(slot, pack.first_token, pack.order, pack.index.data if self._hashes else None)

    def clear(self, slot: int) -> None:
        self._views[slot] = View()
        self._step.clear(slot)

    def ends(self, products: Products) -> HostEnds:
        return HostEnds(self, products)

    def begin(self, rows: Rows, step: int) -> None:
        self._step.begin(to_dlpack(rows.slot), to_dlpack(rows.position), rows.count, step)

    def look_up(self, layer: int, query: torch.Tensor, kind: QueryKind) -> None:
        self._step.look_up(layer, to_dlpack(query), kind)

    def arrive(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._step.arrive(layer, to_dlpack(key), to_dlpack(value))

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        self._step.attend(layer, to_dlpack(query), to_dlpack(out), to_dlpack(lse))

    def await_ticket(self, layer: int) -> None:
        self._step.await_ticket(layer)

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._step.append(layer, to_dlpack(key), to_dlpack(value))

    def settle(self, timeout_us: int) -> None:
        self._step.settle(timeout_us)

    def look_ahead(self, layer: int, query: torch.Tensor) -> None:
        self._step.look_ahead(layer, to_dlpack(query))

    def plan(self, layer: int, query: torch.Tensor, kind: QueryKind) -> Ticket | None:
        return _ticket(Op.GATHER, layer, *self._step.plan(layer, to_dlpack(query), kind))

    def plan_ahead(self, layer: int, query: torch.Tensor) -> Ticket | None:
        return _ticket(Op.PROMOTE, layer, *self._step.plan_ahead(layer, to_dlpack(query)))

    def commit(self, layer: int, statuses: NDArray[np.uint32] | None) -> None:
        self._step.commit(layer, statuses)


def _ticket(op: Op, layer: int, runs: bytes, pairs: bytes) -> Ticket | None:
    if not runs:
        return None
    return Ticket(op, layer, np.frombuffer(runs, RUN_DTYPE), np.frombuffer(pairs, np.uint32).reshape(-1, 2))


def _select(
    retriever: Retriever,
    views: list[View],
    layer: int,
    slot: int,
    head: int,
    query: NDArray[np.float32],
    low: int,
    high: int,
    k: int,
    unit: int,
) -> NDArray[np.int32]:
    return retriever.select(layer, head, views[slot], query, low, high, k, unit)
