"""Prefixes: which stored packs a prompt starts with."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore_service.daemon.store.registry import Worker
from kvstore_service.daemon.store.state import State
from kvstore_service.daemon.store.uploads import pack_id
from kvstore_service.shared.types import FINGERPRINT_BYTES, NO_PARENT, PackRef, PackRow, PrefixCandidate, StoreError

CANDIDATES_MAX = 16384
CHAINS_MAX = 8
PROBES_MAX = 256  # files that a lookup opens beyond a damaged one
LOOKS = 12  # at a chain that is being evicted or rewritten meanwhile, which takes as long as a commit
LOOK_S = 0.001


class Prefixes:
    """Finds chains of packs."""

    def __init__(self, state: State) -> None:
        self._state = state

    def lookup(
        self,
        worker: Worker,
        fingerprint: bytes,
        candidates: Sequence[PrefixCandidate],
        require_active: Callable[[], None] = lambda: None,
    ) -> list[PackRef]:
        """The longest chain of whole packs from token 0, over candidates that may overlap (different pack sizes).

        Where one pack of a chain is damaged, the others are looked at closely: what has to be written again is found
        at once, not one pack a run.

        require_active: raises once nobody waits for the answer."""
        self._state.begin_lookup()
        outcome = "lookup_errors"
        try:
            longest = self._leased(worker, fingerprint, candidates, require_active)
            self._state.lookups.note(worker.tenant, worker.name, fingerprint, candidates, longest)
            outcome = "lookup_hits" if longest else "lookup_misses"
        finally:
            self._state.end_lookup(outcome)
        return longest

    def _leased(
        self,
        worker: Worker,
        fingerprint: bytes,
        candidates: Sequence[PrefixCandidate],
        require_active: Callable[[], None],
    ) -> list[PackRef]:
        """What is found stays for a while: the last pack's lease keeps the whole chain from being evicted."""
        for look in range(LOOKS):
            replaced = self._state.catalog.replaced
            found = self._longest(worker, fingerprint, candidates, require_active)
            if not found:
                return found
            last = found[-1].pack_id
            self._state.leases.take([last], worker.token, worker.uid)
            # It may have gone between the look and the lease, or be about to go, or another build of what it continues
            # has come.
            stays = not self._state.registry.is_condemned(last) and self._state.catalog.served(last) is not None
            if stays and self._state.catalog.replaced == replaced:
                self._state.use([ref.pack_id for ref in found])
                self._state.count("lookup_tokens_found", found[-1].end)
                return found
            time.sleep(LOOK_S * 2**look)
        return []

    def _longest(
        self,
        worker: Worker,
        fingerprint: bytes,
        candidates: Sequence[PrefixCandidate],
        require_active: Callable[[], None],
    ) -> list[PackRef]:
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise StoreError("INVALID_ARGUMENT", f"a fingerprint has {FINGERPRINT_BYTES} bytes, not {len(fingerprint)}")
        if len(candidates) > CANDIDATES_MAX:
            raise StoreError("INVALID_ARGUMENT", f"{len(candidates)} candidates; at most {CANDIDATES_MAX}")
        tenant_key = self._state.tenant_key(worker)
        ordered = sorted(candidates, key=lambda item: item.first_token)

        def find(name: bytes) -> PackRow | None:
            require_active()
            return self._state.served(name, worker)

        def name_of(parent: bytes, item: PrefixCandidate) -> bytes:
            return pack_id(tenant_key, parent, fingerprint, item.token_digest)

        longest = _walk(ordered, name_of, find)
        if self._state.catalog.totals_of(worker.tenant).damaged:
            stored = _walk(ordered, name_of, lambda name: self._state.stored(name, worker))
            if len(stored) > len(longest):
                self._state.probe(stored[:PROBES_MAX])
                longest = _walk(ordered, name_of, find)
        return [row.ref for row in longest]


class _Link(NamedTuple):
    """The end of a chain. Chains share what they have in common: their lists would take the square of the packs."""

    row: PackRow
    before: "_Link | None"


def _walk(
    candidates: Sequence[PrefixCandidate],
    name_of: Callable[[bytes, PrefixCandidate], bytes],
    find: Callable[[bytes], PackRow | None],
) -> list[PackRow]:
    """The longest chain of what is found. `candidates` are in the order of their first tokens."""
    ending: defaultdict[int, list[_Link | None]] = defaultdict(list, {0: [None]})
    for item in candidates:
        for link in ending.get(item.first_token, []):
            row = find(name_of(link.row.ref.pack_id if link else NO_PARENT, item))
            if row is not None and row.ref.tokens == item.tokens and len(ending[row.ref.end]) < CHAINS_MAX:
                ending[row.ref.end].append(_Link(row, link))
    chain, last = [], ending[max(ending)][0]
    while last is not None:
        chain.append(last.row)
        last = last.before
    return chain[::-1]
