"""What a session takes on the device, and what its steps attend to; defined in docs/architecture.md (Figures)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decode_worker.engine.engine import Engine
from decode_worker.engine.session import Session
from decode_worker.policy.attended import attended_places


@dataclass(frozen=True)
class Footprint:
    """Bytes of one session of the present policy. `offloaded_heads`: heads, of all layers, that are not resident."""

    device_bytes: int
    resident_bytes: int
    offloaded_bytes: int
    index_bytes: int
    offloaded_heads: int

    @staticmethod
    def of(engine: Engine, session: Session) -> Footprint:
        geometry = session.geometry
        return Footprint(
            geometry.device_bytes,
            geometry.resident_bytes,
            geometry.offloaded_bytes(session.stored),
            engine.index_bytes(session),
            int((~geometry.resident).sum()),
        )

    @property
    def device_share(self) -> float:
        """What the device holds for offloaded KV (selected, slack, tail, labels, index) ÷ that KV; 1 without any."""
        held = self.device_bytes - self.resident_bytes + self.index_bytes
        return held / self.offloaded_bytes if self.offloaded_bytes else 1.0


def attended_share(engine: Engine, session: Session) -> float:
    """Tokens that an offloaded head attended to in the last step ÷ the session's tokens, mean over these heads.

    1 where every head is resident. The session was alone in that step."""
    state, slot = engine.policy.state, session.slot
    shares = [
        len(attended_places(state, layer, slot, head, session.position - 1)) / session.position
        for layer, head in np.argwhere(~session.geometry.resident).tolist()
    ]
    return sum(shares) / len(shares) if shares else 1.0
