"""Lookups: the latest ones, remembered so that an operator can ask why a prompt was not found."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore_service.shared.types import NO_PARENT, PackRef, PrefixCandidate

LOOKUPS_MAX = 512
NEXT_MAX = 8


@dataclass(frozen=True)
class Lookup:
    """`digest`: of the prompt's last candidate. `parent`: the last pack that was found; `then`: the candidates that
    could have continued it, a few of them. `at_s`: Unix time."""

    digest: bytes
    tenant: str
    worker: str
    fingerprint: bytes
    found_tokens: int
    asked_tokens: int
    parent: bytes
    then: tuple[PrefixCandidate, ...]
    at_s: float = field(default_factory=time.time)


class Lookups:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: deque[Lookup] = deque(maxlen=LOOKUPS_MAX)

    def note(
        self,
        tenant: str,
        worker: str,
        fingerprint: bytes,
        candidates: Sequence[PrefixCandidate],
        found: Sequence[PackRef],
    ) -> None:
        if not candidates:
            return
        last = max(candidates, key=lambda item: item.first_token + item.tokens)
        end = found[-1].end if found else 0
        then = tuple(item for item in candidates if item.first_token == end)[:NEXT_MAX]
        parent = found[-1].pack_id if found else NO_PARENT
        asked = last.first_token + last.tokens
        with self._lock:
            self._latest.append(Lookup(last.token_digest, tenant, worker, fingerprint, end, asked, parent, then))

    def latest(self, beginning: str = "") -> list[Lookup]:
        """Those whose digest begins so in hex, the newest first."""
        with self._lock:
            return [item for item in reversed(self._latest) if item.digest.hex().startswith(beginning)]
