"""What of a prompt is worth DRAM right after its prefill, by name: what its last queries attend to (KVDrive §7.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from decode_worker.kernels.registry import Registry

if TYPE_CHECKING:  # a flag is chosen from the names here, before anybody needs torch
    import torch

HOT_FRACTION = 0.1
# The grade of a block by the share of its records that are hot: none, some, above a quarter, above half. A grade
# is worth as many rounds without a use; one of 1 would be forgotten before the first step's sets have been fetched.
SHARES = (0.0, 0.25, 0.5)
GRADES = np.array([0, 3, 5, 7], np.uint8)


@dataclass(frozen=True)
class Importance:
    """`score(mass)`: scores float32 [H, T] of any scale, from the attention mass that the prompt's last queries give
    each token, float32 [H, T]; None: packs are not graded. `hints`: the store reads what stands first in segments."""

    score: Callable[[torch.Tensor], torch.Tensor] | None = None
    hints: bool = True

    def hot(self, mass: torch.Tensor) -> NDArray[np.bool_] | None:
        """HOT_FRACTION of the prompt's tokens, bool [H, T], where packs are graded."""
        if self.score is None:
            return None
        scores = self.score(mass)
        hot = np.zeros(scores.shape, bool)
        np.put_along_axis(hot, scores.topk(hot_records(scores.shape[1]), dim=1).indices.cpu().numpy(), True, axis=1)
        return hot


def hot_records(tokens: int) -> int:
    """How many of so many are important enough to come first, or to be kept."""
    return max(1, int(tokens * HOT_FRACTION))


IMPORTANCES: Registry[Importance] = Registry("importance")


def _head(mass: torch.Tensor) -> torch.Tensor:
    return mass


def _position(mass: torch.Tensor) -> torch.Tensor:
    return mass.sum(0, keepdim=True).expand_as(mass)


IMPORTANCES.register("head")(Importance(_head))
IMPORTANCES.register("position")(Importance(_position))
IMPORTANCES.register("hint")(Importance())
IMPORTANCES.register("none")(Importance(hints=False))


def grades(hot: NDArray[np.bool_], order: NDArray[np.uint16], per_block: int) -> NDArray[np.uint8]:
    """What blocks of `per_block` records are worth, uint8 [H, blocks], of hot tokens [H, n] in an order, record ->
    token, [H, n]: one of GRADES."""
    lanes, tokens = order.shape
    blocks = -(-tokens // per_block)
    records = np.zeros((lanes, blocks * per_block), np.float32)
    records[:, :tokens] = np.take_along_axis(hot, order.astype(np.intp), axis=1)
    share = records.reshape(lanes, blocks, per_block).mean(2)
    graded: NDArray[np.uint8] = GRADES[np.digitize(share, SHARES, right=True)]
    return graded
