"""A HeadState of random contents, its window, and the reference set on a copy of both."""

from __future__ import annotations

import copy

import numpy as np
import torch

from decode_worker.device import Host
from decode_worker.kernels.base import Rows, StepContext
from decode_worker.kernels.reference import STORAGE, ReferenceKernels
from decode_worker.kernels.state import HeadState
from decode_worker.policy.settings import SEAL_TOKENS, PolicySettings
from tests.qsac.pretend import RandomRetriever

CONTEXT = 1024
DTYPES = {"float32": 1, "bfloat16": 2, "float16": 3}


class Heads:
    """Two layers, some of whose heads are resident; rows of some slots, of which some are padding."""

    def __init__(
        self, rng: np.random.Generator, *, heads: int = 2, group: int = 2, d: int = 64, dtype: str = "float32",
        slots: int = 3, layers: int = 2, unit: int = 1, stale_fails: bool = False, context: int = CONTEXT,
        resident_share: float = 0.3,
    ) -> None:  # fmt: skip
        self.rng, self.dtype = rng, STORAGE[DTYPES[dtype]]
        element = self.dtype.itemsize
        self.record_bytes = -(-2 * d * element // 64) * 64
        resident = rng.random((layers, heads)) < resident_share
        resident[0, 0] = resident_share == 1
        self.settings = PolicySettings(
            slots=slots, layers=layers, kv_heads=heads, group=group, head_dim=d, record_bytes=self.record_bytes,
            context=context, tau=np.full((layers, heads), 0.8, np.float32),
            weights=np.ones((layers, heads, group), np.float32), resident=resident, budget=100, recent=16,
            tail=16 + SEAL_TOKENS + 32, unit=unit,
        )  # fmt: skip
        self.state = HeadState(self.settings)
        geometry = self.settings.geometry(context, context)
        self.window = np.zeros(slots * geometry.slot_bytes, np.uint8)
        values = torch.from_numpy(rng.standard_normal(len(self.window) // element, dtype=np.float32))
        self.window[:] = values.to(self.dtype).view(torch.uint8).numpy()
        positions = np.zeros(slots, np.int32)
        for slot in range(slots):
            self.state.bind(slot, geometry, slot * geometry.slot_bytes, 0, 0)
            positions[slot] = self._fill(slot, geometry)
        self.rows = Rows(slots)
        order = rng.permutation(slots)
        bound = [int(slot) if i == 0 or rng.random() < 0.8 else -1 for i, slot in enumerate(order)]
        self.rows.set(bound, positions[order].tolist())
        window = torch.from_numpy(self.window)
        self.context = StepContext(
            self.settings, self.state, RandomRetriever(0), Host(), window, window, None, DTYPES[dtype],
            self.record_bytes, d**-0.5, 1, stale_fails, 1000,
        )  # fmt: skip

    def _fill(self, slot: int, geometry) -> int:
        """Sets as a session may hold them at a position, which it returns."""
        s, state, rng = self.settings, self.state, self.rng
        position = int(rng.integers(1, s.context))
        for side, layer, head in np.ndindex(2, s.layers, s.kv_heads):
            at = side, layer, slot, head
            cover = int(rng.integers(max(0, position - s.tail + 1), position + 1))
            capacity = int(geometry.capacity[layer, head])
            count = int(rng.integers(0, min(state.shape.places, capacity) + 1)) * (rng.random() < 0.8)
            state.cover[at], state.count[at] = cover, int(count)
            chosen = s.sink + np.sort(rng.permutation(capacity)[: int(count)])
            state.places[at][: int(count)] = torch.from_numpy(chosen.astype(np.int32))
        state.parity[:, slot] = torch.from_numpy(rng.integers(0, 2, (s.layers, s.kv_heads)).astype(np.uint8))
        return position

    @property
    def words(self) -> torch.Tensor:
        """The window in the storage dtype."""
        return torch.from_numpy(self.window).view(self.dtype)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal(shape, dtype=np.float32))

    def reference(self, keeps_faults: bool = False) -> ReferenceKernels:
        """On a copy of state and window, at the beginning of a step, or behind what its row has a fault of."""
        values = {name: getattr(self.context, name) for name in StepContext.__dataclass_fields__}
        copied = copy.deepcopy({name: values[name] for name in ("state", "window", "landing")})
        kernels = ReferenceKernels(StepContext(**{**values, **copied}))
        kernels.begin(self.rows, 1)
        if keeps_faults:
            kernels.context.state.fault[:] = self.state.fault
        return kernels


def same_state(state: HeadState, other: HeadState) -> None:
    for name, value in vars(other).items():
        if torch.is_tensor(value):
            assert torch.equal(getattr(state, name), value), f"{name} differs"
