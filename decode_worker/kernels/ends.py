"""Both ends of a step: what it is told of its rows, and what the host learns of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from decode_worker.kernels.base import Kernels, Rows
from decode_worker.kernels.products.base import Products
from decode_worker.model.sampling import GREEDY, Sampling, next_tokens
from decode_worker.policy.counters import Counters

STEPS = Counters.NAMES.index("steps")


@dataclass(frozen=True)
class Row:
    """One token of a slot's session, and how the next one is chosen."""

    slot: int
    token: int
    position: int
    sampling: Sampling = GREEDY


@dataclass(frozen=True)
class Seen:
    """The state as a step has left it. covers: slot -> the least cover of its heads that are not resident, of those
    with any."""

    counters: Counters
    covers: Mapping[int, int]


class Ends(ABC):
    """Of one set's steps. `first`, `last`: launches (of so many rows) at both ends of a step's line, always the same;
    the line lies between `place` and `read`. Not thread-safe."""

    first: tuple[Callable[[int], None], ...] = ()
    last: tuple[Callable[[int], None], ...] = ()

    @abstractmethod
    def place(self, wanted: Sequence[Row], rows: int, step: int) -> None:
        """rows: at least as many as `wanted`; the others are padding. IndexError for a token or position that the
        model lacks."""

    @abstractmethod
    def read(self) -> list[int]:
        """Each wanted row's fault (csrc/cpu/head_state.h), 0: none. RingError for what concerns all of them."""

    @abstractmethod
    def tokens(self) -> list[int | None]:
        """Of the step that was read: what each wanted row goes on with; None where logits are not numbers."""

    def seen(self) -> Seen | None:
        """Of the step that was read, where a look at the state would wait for a device."""
        return None

    @abstractmethod
    def settle(self, timeout_s: float) -> None:
        """After an error between `place` and `read`: nothing that was launched runs any more, or `timeout_s` are over.
        Raises nothing: the error under way matters more."""


class HostEnds(Ends):
    """Of kernels and products that work in the host's memory."""

    def __init__(self, kernels: Kernels, products: Products) -> None:
        self._kernels = kernels
        self._products = products
        self._rows = Rows(kernels.context.settings.slots)
        self._wanted: Sequence[Row] = ()

    def place(self, wanted: Sequence[Row], rows: int, step: int) -> None:
        slots, positions = [row.slot for row in wanted], [row.position for row in wanted]
        self._products.place([row.token for row in wanted], positions)
        self._rows.set(slots, positions, rows)
        self._kernels.begin(self._rows, step)
        self._kernels.context.state.counters[STEPS] += 1
        self._wanted = wanted

    def read(self) -> list[int]:
        self._kernels.raise_for_error()
        faults = self._kernels.context.state.fault.tolist()
        return [faults[row.slot] for row in self._wanted]

    def tokens(self) -> list[int | None]:
        wanted = self._wanted
        logits = self._products.logits[: len(wanted)]
        return next_tokens([row.sampling for row in wanted], [row.position + 1 for row in wanted], logits)

    def settle(self, timeout_s: float) -> None: ...
