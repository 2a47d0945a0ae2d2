"""What runs a decode step between the products of its layers, and the order in which that happens.

A step of some rows (row i processes position[i] of slot[i]):

    kernels.begin(rows, step)
    for each layer:
        kernels.look_up(layer, query, kind)     similarity with the labels → selection → delta → ticket
        kernels.arrive(layer, key, value)       waits for the layer's ticket, commits it, writes the new tokens
        kernels.attend(layer, query, out, lse)  over sinks ∪ attended places ∪ tail, or everything

`look_up` of a layer comes before its `arrive`, usually with the layer before it in between; nothing is decided outside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from decode_worker import _native
from decode_worker.device import Device
from decode_worker.kernels.state import HeadState
from decode_worker.policy.lookahead import HINTED_BYTES_MAX, OFF, Lookahead
from decode_worker.policy.plan import QueryKind, Ticket
from decode_worker.policy.settings import PolicySettings
from decode_worker.retrieval.base import Retriever
from decode_worker.retrieval.view import StoredPack
from decode_worker.window.base import Frames

if TYPE_CHECKING:
    from decode_worker.kernels.ends import Ends
    from decode_worker.kernels.products.base import Products


@dataclass(frozen=True)
class RecordKind:
    """dtype: enum Dtype in csrc/core/pack.h."""

    dtype: int
    record_bytes: int


@dataclass(frozen=True, eq=False)
class StepContext:
    """What a kernel set works on. `window`, `landing`, `frames`: decode_worker/window/base.py; `ring`: None for a set
    whose tickets others carry out. `dtype`, `record_bytes`: of the records that it writes; `stored`: of those that come
    from packs."""

    settings: PolicySettings
    state: HeadState
    retriever: Retriever
    device: Device
    window: torch.Tensor
    landing: torch.Tensor
    ring: _native.RingProducer | None
    dtype: int  # enum Dtype in csrc/core/pack.h
    record_bytes: int
    scale: float
    threads: int
    stale_fails: bool
    wait_us: int
    frames: Frames | None = None
    stored: RecordKind | None = None  # None: as it writes them
    lookahead: Lookahead = OFF
    more_rings: tuple[_native.RingProducer, ...] = ()  # beside `ring`, of the same geometry

    @property
    def hinted_records_max(self) -> int:
        """Of a step."""
        return HINTED_BYTES_MAX // self.kinds[-1].record_bytes

    @property
    def kinds(self) -> list[RecordKind]:
        """Of the records that it writes; then of those of packs, if that is another one."""
        own = RecordKind(self.dtype, self.record_bytes)
        return [own] if self.stored is None or self.stored == own else [own, self.stored]


class Rows:
    """The fixed tensors that say which row of a step is whose: int32[slots], of which the first `count` take part."""

    def __init__(self, slots: int) -> None:
        self.slot = torch.full((slots,), -1, dtype=torch.int32)
        self.position = torch.zeros(slots, dtype=torch.int32)
        self.count = 0

    def set(self, slots: Sequence[int], positions: Sequence[int], count: int = 0) -> None:
        """count: of rows, if there are to be more than slots; those have slot -1."""
        self.count = max(len(slots), count)
        self.slot[len(slots) : self.count] = -1
        self.slot[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
        self.position[: len(slots)] = torch.tensor(positions, dtype=torch.int32)


class Kernels(ABC):
    """One set of kernels over one HeadState. Not thread-safe. All tensors are contiguous; float ones are float32.

    A row's fault is left in `state.fault` of its slot (a number of csrc/cpu/head_state.h): the row goes on, with
    whatever its heads hold, and the others are not concerned. RingError is raised for what concerns all of them.
    `gathers`: whether it copies records that the daemon delivers elsewhere to their places in the window.
    `mixes`: whether it attends over records of two kinds. `looks_ahead`: whether it hints what heads will want.
    `shares`: whether it posts to several rings.
    """

    gathers: ClassVar[bool] = False
    mixes: ClassVar[bool] = True
    looks_ahead: ClassVar[bool] = True
    shares: ClassVar[bool] = False

    def __init__(self, context: StepContext) -> None:
        """ValueError for a window or for records that it cannot work on."""
        if len(context.kinds) > 1 and not self.mixes:
            raise ValueError(
                "record_kind: these kernels do not attend to quantised records; give --record-kind model or "
                "--kernels cpu"
            )
        if context.lookahead and not self.looks_ahead:
            raise ValueError("lookahead: these kernels do not look ahead; give --lookahead off or --kernels cpu")
        if context.more_rings and not self.shares:
            raise ValueError("decode_rings: these kernels post to one ring; give --decode-rings 1 or --kernels cpu")
        if context.landing is not context.window and not self.gathers:
            raise ValueError(
                "window: kernels on a CPU read only where the daemon delivers; give --window shm or --kernels triton"
            )
        self.context = context

    @abstractmethod
    def close(self) -> None:
        """Lets go of the window; nothing else may be called afterwards."""

    @abstractmethod
    def extend(self, slot: int, pack: StoredPack) -> None:
        """A slot's next pack. Between steps."""

    @abstractmethod
    def clear(self, slot: int) -> None:
        """Forgets a slot's packs. Between steps."""

    @abstractmethod
    def ends(self, products: Products) -> Ends:
        """Of whole steps, between whose launches come those of `products`."""

    @abstractmethod
    def begin(self, rows: Rows, step: int) -> None:
        """Rows of the step to come; valid until the next call. Clears their faults."""

    def raise_for_error(self) -> None:  # noqa: B027  most sets raise at once
        """Behind a step: RingError for what concerned all its rows, of a set that could not raise within it."""

    @abstractmethod
    def look_up(self, layer: int, query: torch.Tensor, kind: QueryKind) -> None:
        """query: [rows, H * g, d], which need not outlive the call. Posts the layer's ticket if any head needs records;
        changes labels, sets and covers of heads that need none."""

    @abstractmethod
    def arrive(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """key, value: [rows, H, d]. Waits for the layer's ticket if there is one, at most `wait_us`."""

    @abstractmethod
    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """query, out: [rows, H * g, d]; lse: [rows, H * g], the log of the sum of exp(score), -inf over nothing."""

    @abstractmethod
    def await_ticket(self, layer: int) -> None:
        """The first half of `arrive`: without a new token."""

    @abstractmethod
    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """The second half of `arrive`."""

    @abstractmethod
    def settle(self, timeout_us: int) -> None:
        """After an error within a step: no ticket is left behind, as its places could not be used again otherwise."""

    def look_ahead(self, layer: int, query: torch.Tensor) -> None:
        """query: as in `look_up`, whatever it was made of. Hints (PROMOTE) which records heads of the layer lack that
        will miss soon; changes no head, waits for nothing, and hints at most so much in a step. TypeError for a set
        that does not look ahead."""
        raise TypeError(f"{type(self).__name__} does not look ahead")

    def plan_ahead(self, layer: int, query: torch.Tensor) -> Ticket | None:
        """`look_ahead` without posting."""
        raise TypeError(f"{type(self).__name__} does not look ahead")

    # --- the halves of `look_up` and `arrive`, for whoever carries tickets out himself ---

    @abstractmethod
    def plan(self, layer: int, query: torch.Tensor, kind: QueryKind) -> Ticket | None:
        """`look_up` without posting."""

    @abstractmethod
    def commit(self, layer: int, statuses: NDArray[np.uint32] | None) -> None:
        """statuses: uint32[runs, 2] (status, aux) of the layer's plan; None: it was never posted."""
