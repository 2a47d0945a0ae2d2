"""Prefixes: which stored packs a prompt starts with."""

from collections import defaultdict
from collections.abc import Sequence

from kvstore_service.daemon.store.registry import Worker
from kvstore_service.daemon.store.state import State
from kvstore_service.daemon.store.uploads import pack_id
from kvstore_service.shared.types import NO_PARENT, PackRef, PrefixCandidate, StoreError

CANDIDATES_MAX = 16384
CHAINS_MAX = 8


class Prefixes:
    """Finds chains of packs."""

    def __init__(self, state: State) -> None:
        self._state = state

    def lookup(self, worker: Worker, fingerprint: bytes, candidates: Sequence[PrefixCandidate]) -> list[PackRef]:
        """The longest chain of whole packs from token 0, over candidates that may overlap (different pack sizes)."""
        self._state.count("lookups")
        try:
            longest = self._longest(worker, fingerprint, candidates)
        except BaseException:
            self._state.count("lookup_errors")
            raise
        self._state.count("lookup_hits" if longest else "lookup_misses")
        return longest

    def _longest(self, worker: Worker, fingerprint: bytes, candidates: Sequence[PrefixCandidate]) -> list[PackRef]:
        if len(candidates) > CANDIDATES_MAX:
            raise StoreError("INVALID_ARGUMENT", f"{len(candidates)} candidates; at most {CANDIDATES_MAX}")
        key = self._state.tenant_key(worker)
        ending: defaultdict[int, list[list[PackRef]]] = defaultdict(list, {0: [[]]})
        for item in sorted(candidates, key=lambda item: item.first_token):
            for chain in ending.get(item.first_token, []):
                parent = chain[-1].pack_id if chain else NO_PARENT
                row = self._state.served(pack_id(key, parent, fingerprint, item.token_digest), worker)
                if row is not None and row.ref.tokens == item.tokens and len(ending[row.ref.end]) < CHAINS_MAX:
                    ending[row.ref.end].append([*chain, row.ref])
        longest = ending[max(ending)][0]
        self._state.count("lookup_tokens_found", longest[-1].end if longest else 0)
        return longest
