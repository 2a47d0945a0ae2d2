"""Both ends of a step on a device: two blocks of the host's memory that its kernels read and write, and nothing else.

The device keeps its rows: slot, token, position, and how they choose. The end of a step moves each of them on. The
host keeps a copy of what that made of them, compares it with what the next step is to be, and describes the rows that
differ: who joined, left, or was given another token. A step that goes on with all of its rows copies nothing to the
device.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from decode_worker.gpu.errors import raise_for
from decode_worker.gpu.kernels import advance, begin
from decode_worker.gpu.kernels.sample import Sampled, sample
from decode_worker.gpu.rows import DeviceRows
from decode_worker.kernels.base import StepContext
from decode_worker.kernels.ends import Ends, Row, Seen
from decode_worker.kernels.products.base import Products
from decode_worker.policy.counters import Counters

NOBODY = Row(-1, 0, 0)
COMMON = 16  # words of a block that are no row's
COMPUTING_S = 10.0  # that a step may take beside its waits
LOOK_S_MIN, LOOK_S_MAX = 20e-6, 1e-3  # between two looks at a step that is waited for


class DeviceEnds(Ends):
    """counted: tensors that are zero between launches. error: int32[1], decode_worker/gpu/errors.py."""

    def __init__(
        self,
        context: StepContext,
        products: Products,
        rows: DeviceRows,
        counted: Sequence[torch.Tensor],
        error: torch.Tensor,
    ) -> None:
        self._device, self._state, self._products = context.device, context.state, products
        self._rows, self._counted, self._error = rows, list(counted), error
        slots, device = context.settings.slots, error.device
        self._asked, asked = self._block((len(begin.ROW_FIELDS) + 1) * slots)
        self._told, told = self._block(len(advance.TOLD_FIELDS) * slots)
        self._asked_common, self._told_common = asked[:COMMON], told[:COMMON]
        self._asked_rows, self._told_rows = asked[COMMON:].view(-1, slots), told[COMMON:].view(-1, slots)
        self._held = torch.zeros((len(begin.ROW_FIELDS), slots), dtype=torch.int64, device=device)
        self._held[begin.SLOT] = -1
        self._number_held = torch.zeros(1, dtype=torch.int64, device=device)
        self._sampled = Sampled(slots, products.logits.shape[1], device)
        self._ended = torch.zeros(1, dtype=torch.int32, device=device)
        self._counted += [self._sampled.ended, self._ended]
        # Each layer may wait for credit and for its ticket.
        self._timeout_s = 2 * context.settings.layers * context.wait_us * 1e-6 + COMPUTING_S
        self._copies: list[Row | None] = [None] * slots  # of what the device holds; None: not known
        self._wanted: Sequence[Row] = ()
        self._number = 0
        self._under_way = False
        self.first, self.last = (self._take,), (self._sample, self._advance)

    def _block(self, words: int) -> tuple[NDArray[np.int64], torch.Tensor]:
        """Of the host's memory, and as kernels see it."""
        memory = np.frombuffer(mmap.mmap(-1, 8 * (COMMON + words)), np.uint8)
        return memory.view(np.int64), self._device.share(memory).view(torch.int64)

    # --- the host's part ---

    def place(self, wanted: Sequence[Row], rows: int, step: int) -> None:
        self._products.check([row.token for row in wanted], [row.position for row in wanted])
        self._until(lambda: not self._under_way or self._device.idle(), self._timeout_s)
        described = [*wanted, *[NOBODY] * (rows - len(wanted))]
        common, fields = self._asked[:COMMON], self._asked[COMMON:].reshape(len(begin.ROW_FIELDS) + 1, -1)
        for i, (row, copy) in enumerate(zip(described, self._copies, strict=False)):
            fields[begin.CHANGED, i] = row != copy
            if row != copy:
                fields[: begin.CHANGED, i] = words_of(row)
        self._number += 1
        common[begin.NUMBER], common[begin.STEP] = self._number, step
        self._copies[:rows] = [None] * rows
        self._rows.count, self._wanted, self._under_way = rows, wanted, True

    def read(self) -> list[int]:
        self._until(self._has_ended, self._timeout_s)
        self._under_way = False
        fields = self._told[COMMON:].reshape(len(advance.TOLD_FIELDS), -1)[:, : len(self._wanted)]
        following, self._finite, faults, covers = fields.tolist()
        common = self._told[: advance.COMMON].tolist()
        self._following = following
        pairs = zip(self._wanted, following, strict=True)
        copies = [replace(row, token=token, position=row.position + 1) for row, token in pairs]
        self._copies[: self._rows.count] = [*copies, *[NOBODY] * (self._rows.count - len(copies))]
        of_slots = zip(self._wanted, covers, strict=True)
        self._seen = Seen(
            Counters.of(common[advance.COUNTED :]),
            {row.slot: cover for row, cover in of_slots if cover != advance.NO_COVER},
        )
        raise_for(common[advance.ERROR])
        return faults

    def tokens(self) -> list[int | None]:
        return [token if finite else None for token, finite in zip(self._following, self._finite, strict=True)]

    def seen(self) -> Seen:
        return self._seen

    def settle(self, timeout_s: float) -> None:
        with contextlib.suppress(Exception):
            self._until(self._device.idle, timeout_s)

    def _has_ended(self) -> bool:
        """RuntimeError where that cannot be any more."""
        if self._told[advance.NUMBER] == self._number:
            return True
        if self._device.idle() and self._told[advance.NUMBER] != self._number:
            raise RuntimeError("a step's launches have ended without its result: a kernel failed; restart the worker")
        return False

    def _until(self, done: Callable[[], bool], timeout_s: float) -> None:
        """Naps a 64th of what it has waited, so it is that late and takes little of a core. RuntimeError if it is not
        done by then."""
        started_s = time.monotonic()
        while not done():
            waited_s = time.monotonic() - started_s
            if waited_s >= timeout_s:
                raise RuntimeError(
                    f"a step has not ended after {timeout_s:.1f} s: the device hangs; restart the worker"
                )
            time.sleep(min(max(LOOK_S_MIN, waited_s / 64), LOOK_S_MAX))

    # --- the launches ---

    def _take(self, rows: int) -> None:
        torch._foreach_zero_(self._counted)  # as an interrupted launch of the interpreter would not leave them
        r, products = self._rows, self._products
        begin.take(
            self._asked_rows, self._asked_common, self._held, self._number_held, r.step, r.slots, r.positions,
            products.tokens, products.positions, self._state, rows,
        )  # fmt: skip

    def _sample(self, rows: int) -> None:
        sample(self._held, self._products.logits, rows, self._sampled)

    def _advance(self, rows: int) -> None:
        s = self._sampled
        advance.advance(
            self._held, s.token, s.finite, self._state, self._error, self._number_held, self._told_rows,
            self._told_common, self._ended, rows,
        )  # fmt: skip


def words_of(row: Row) -> list[int]:
    """In the order of begin.ROW_FIELDS."""
    sampling = row.sampling
    floats = np.array([sampling.temperature, sampling.top_p], np.float64).view(np.int64).tolist()
    stream = sampling.stream - (sampling.stream >> 63 << 64)
    return [row.slot, row.token, row.position, *floats, min(sampling.top_k, 1 << 62), stream]
