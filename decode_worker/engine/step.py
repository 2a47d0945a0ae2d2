"""One decode step (docs/architecture.md, docs/qsac.md): the loop that everything else serves.

No RPC happens here and nothing is allocated in shared memory: a miss posts a ticket, the layer that needs it waits.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from decode_worker import _native
from decode_worker.failures import INTERRUPTED_S
from decode_worker.model.transformer import Transformer
from decode_worker.policy.base import Plan, Policy
from decode_worker.records import RecordFormat
from decode_worker.transport import DATA_LOSS, Transport, raise_for_status

TRACED_LAYERS_MAX = 4096
INTERRUPTED_US = int(INTERRUPTED_S * 1e6)


class DecodeLoop:
    """Runs steps of up to `slots` sessions over one policy's window. Not thread-safe.

    `trace` keeps the latest (step, layer, start_ns, end_ns) of each layer's computation, CLOCK_MONOTONIC.
    """

    def __init__(
        self,
        model: Transformer,
        records: RecordFormat,
        policy: Policy,
        transport: Transport,
        *,
        speculative: bool,
        stale_fails: bool,
        threads: int,
    ) -> None:
        self._model = model
        self._records = records
        self._policy = policy
        self._transport = transport
        self._speculative = speculative
        self._stale_fails = stale_fails
        self._threads = threads
        self._pending: dict[int, int] = {}  # layer -> ticket
        self.steps = 0
        self.spent_ns: Counter[str] = Counter()  # phase -> ns: plan, wait, attend; the rest of a step is the model
        self.trace: deque[tuple[int, int, int, int]] = deque(maxlen=TRACED_LAYERS_MAX)

    @torch.inference_mode()
    def step(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Processes one token of each slot; returns logits float32 [B, vocab].

        Raises StoreError (DATA_LOSS: a stored block failed its checksum), after which the same step may be tried again;
        RingTimeout (the daemon is gone), and from then on RingPoisoned.
        """
        self._transport.require_alive()
        try:
            return self._compute(slots, tokens, positions)
        except BaseException as error:
            self._settle_posted(self._transport.wait_us if isinstance(error, Exception) else INTERRUPTED_US)
            raise

    def _compute(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        model = self._model
        at = torch.tensor(positions)
        active, where = np.asarray(slots, dtype=np.int32), np.asarray(positions, dtype=np.int32)
        x = model.embed(torch.tensor(tokens))
        self._policy.begin_step(active, where)
        for layer in range(model.config.layers):
            started = time.monotonic_ns()
            if self._speculative and layer + 1 < model.config.layers and self._policy.selects(layer + 1):
                self._request(layer + 1, model.query(layer + 1, x, at))
            q, k, v = model.qkv(layer, x, at)
            if layer == 0 or not self._speculative:
                self._request(layer, q)
            self._arrive(layer)
            self.remember(layer, k, v)
            x = model.finish(layer, x, self._attend(layer, q))
            self.trace.append((self.steps, layer, started, time.monotonic_ns()))
        self.steps += 1
        return model.logits(x)

    def _request(self, layer: int, query: torch.Tensor) -> None:
        """Looks every head up and posts what the misses need; does not wait."""
        started = time.monotonic_ns()
        plan: Plan | None = self._policy.plan(layer, query.float().numpy())
        if plan is not None:
            self._pending[layer] = self._transport.decode.post(
                _native.OP_GATHER, self.steps & 0xFFFFFFFF, layer, plan.runs, plan.pairs, self._transport.wait_us
            )
        self.spent_ns["plan"] += time.monotonic_ns() - started

    def _arrive(self, layer: int) -> None:
        """Waits for the layer's ticket, if it has one, and commits it."""
        if layer not in self._pending:
            return
        started = time.monotonic_ns()
        statuses = self._transport.decode.wait(self._pending.pop(layer), self._transport.wait_us)
        usable = self._policy.settle(layer, statuses)
        # A lost block is never papered over with an old set, whatever the stale setting says.
        if not usable or self._stale_fails or DATA_LOSS in statuses[:, 1]:
            raise_for_status(statuses)
        self.spent_ns["wait"] += time.monotonic_ns() - started

    def _settle_posted(self, wait_us: int) -> None:
        """A failed step leaves no ticket behind: its places could not be used again before the ticket has ended."""
        while self._pending:
            layer, seq = self._pending.popitem()
            with contextlib.suppress(_native.RingError):  # poisoned: nothing is used again
                self._policy.settle(layer, self._transport.decode.wait(seq, wait_us))

    def remember(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes K, V [B, H, d] of the present step's tokens to their places."""
        _native.store_token(
            self._transport.window.bytes,
            self._policy.base(layer),
            self._policy.write_places(layer),
            _array(key),
            _array(value),
            self._records.code,
            self._records.record_bytes,
        )

    def _attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        started = time.monotonic_ns()
        ranges, places, counts = self._policy.segments(layer)
        out = _native.attend(
            _array(query),
            self._transport.window.bytes,
            self._policy.base(layer),
            ranges,
            places,
            counts,
            self._records.code,
            self._records.record_bytes,
            self._model.scale,
            self._threads,
        )
        self.spent_ns["attend"] += time.monotonic_ns() - started
        return torch.from_numpy(out).to(query.dtype)


def _array(x: torch.Tensor) -> NDArray[np.float32]:
    return np.ascontiguousarray(x.float().numpy())
