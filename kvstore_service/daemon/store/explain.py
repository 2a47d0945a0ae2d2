"""Explain: why a prompt or a pack is found or not, and what a session's worker waits for."""

import re
import time
from dataclasses import dataclass

import numpy as np

from kvstore_service.daemon import native
from kvstore_service.daemon.store.lookups import Lookup
from kvstore_service.daemon.store.operation import beginning
from kvstore_service.daemon.store.registry import Binding, Session, Worker
from kvstore_service.daemon.store.state import State
from kvstore_service.daemon.store.uploads import pack_id
from kvstore_service.shared.types import NO_PARENT, PACK_ID_BYTES, StoreError

BEGINNING_DIGITS = 6
FINDINGS_MAX = 32
LOOKUPS_SHOWN = 8
SLOT = re.compile(r"(?:(\d{1,19})/)?(\d{1,5})")  # fewer digits than an id's beginning


@dataclass(frozen=True)
class Finding:
    """`answer` is one word of the few that a program can tell apart; `detail` is for people."""

    subject: str
    answer: str
    detail: str


@dataclass(frozen=True)
class SlotWaits:
    """Where the time of a slot's runs went; `ops` and `lanes` as DataPlane.waits has them."""

    worker: int
    slot: int
    session_id: str
    ops: dict[str, dict[str, int]]
    lanes: list[tuple[int, int, int, int, int]]


class Explain:
    """Answers from what is stored and what is remembered; changes nothing."""

    def __init__(self, state: State) -> None:
        self._state = state

    def explain(self, subject: str) -> list[Finding]:
        """A session's id, a slot, the beginning of a pack's id or of a prompt's digest in hex;
        "": the latest lookups. NOT_FOUND."""
        if not subject:
            return [self._prompt(item) for item in self._state.lookups.latest()[:LOOKUPS_SHOWN]]
        for session in self._state.registry.all():
            if session.session_id == subject:
                return self._session(session)
        if SLOT.fullmatch(subject):
            return self._slots(subject)
        text = subject.lower()
        if len(text) < BEGINNING_DIGITS or set(text) - set("0123456789abcdef"):
            raise StoreError(
                "NOT_FOUND", f"{subject!r} is no open session; or give at least {BEGINNING_DIGITS} hex digits of an id"
            )
        names = {row.ref.pack_id for row in beginning(self._state, text, FINDINGS_MAX)}
        names |= {event.pack_id for event in self._state.events.evictions() if event.pack_id.hex().startswith(text)}
        names |= {name for name in self._state.uploads.claims.names() if name.hex().startswith(text)}
        if len(text) == 2 * PACK_ID_BYTES and not self._state.lookups.latest(text):
            names.add(bytes.fromhex(text))
        findings = [self._pack(name) for name in sorted(names)[:FINDINGS_MAX]]
        for item in self._state.lookups.latest(text)[:1]:
            findings += [self._prompt(item), *self._continuations(item)]
        if not findings:
            raise StoreError("NOT_FOUND", f"nothing that is stored or remembered begins with {subject!r}")
        return findings

    def slots(self, subject: str) -> list[SlotWaits]:
        """Of a slot, on every worker unless one is named, or of a session's slots; none of other subjects."""
        found = []
        for worker, slot, binding in self._bound(subject)[:FINDINGS_MAX]:
            try:
                with native.errors():
                    ops, lanes = self._state.plane.waits(worker.native_id or 0, slot)
            except StoreError as error:
                if error.code not in ("FAILED_PRECONDITION", "NOT_FOUND"):  # unbound, or its worker gone, just now
                    raise
                continue
            found.append(SlotWaits(worker.native_id or 0, slot, binding.session.session_id, ops, lanes))
        return found

    def _bound(self, subject: str) -> list[tuple[Worker, int, Binding]]:
        match = SLOT.fullmatch(subject)
        return [
            (worker, slot, binding)
            for worker in self._state.registry.workers()
            for slot, binding in sorted(worker.bound.copy().items(), key=lambda item: item[0])
            if binding.session.session_id == subject
            or (match and slot == int(match[2]) and match[1] in (None, str(worker.native_id)))
        ]

    def _slots(self, subject: str) -> list[Finding]:
        found = [
            Finding(
                f"slot {worker.native_id}/{slot}", "bound",
                f"to session {binding.session.session_id} of {worker.name}, {worker.tenant}: "
                f"{len(binding.packs)} packs",
            )
            for worker, slot, binding in self._bound(subject)[:FINDINGS_MAX]
        ]  # fmt: skip
        if not found:
            raise StoreError("NOT_FOUND", f"slot {subject} is not bound; kvctl sessions shows those that are")
        return found

    def _prompt(self, item: Lookup) -> Finding:
        answer = "found" if item.found_tokens == item.asked_tokens else "partly" if item.found_tokens else "missing"
        ago_s = time.time() - item.at_s
        return Finding(
            f"prompt {item.digest.hex()}", answer,
            f"{item.found_tokens} of {item.asked_tokens} tokens, {ago_s:.0f} s ago, for {item.worker} of {item.tenant}",
        )  # fmt: skip

    def _continuations(self, item: Lookup) -> list[Finding]:
        """Of each candidate that could have continued what was found: why it did not then, as far as it shows now."""
        findings = []
        for candidate in item.then:
            name = self._name(item.tenant, item, candidate.token_digest)
            findings.append(self._pack(name))
            if item.parent != NO_PARENT:
                continue  # what others store has other parents
            for tenant in self._state.catalog.totals_by_tenant():
                other = self._name(tenant, item, candidate.token_digest)
                if tenant != item.tenant and self._state.catalog.served(other) is not None:
                    detail = f"the same text is stored by {tenant}; users do not share packs"
                    findings.append(Finding(f"pack {other.hex()}", "foreign", detail))
        return findings

    def _name(self, tenant: str, item: Lookup, digest: bytes) -> bytes:
        return pack_id(self._state.catalog.tenant_key(tenant), item.parent, item.fingerprint, digest)

    def _pack(self, name: bytes) -> Finding:
        subject = f"pack {name.hex()}"
        try:
            listed = self._state.catalog.listing.listed(name)
        except StoreError:
            return self._absent(name, subject)
        row = listed.row
        idle_s = time.time() - listed.last_used_s
        parts = [f"tokens {row.ref.first_token} to {row.ref.end} of {row.tenant}", f"last used {idle_s:.0f} s ago"]
        if count := self._state.registry.references(name):
            parts.append(f"attached to {count} sessions")
        parts += ["pinned"] * listed.pinned
        if self._state.leases.holds(name):
            parts.append("leased by its finder")
        if listed.damaged:
            parts.append("its file failed a check: the next writer of the same text replaces it")
        return Finding(subject, "damaged" if listed.damaged else "stored", "; ".join(parts))

    def _absent(self, name: bytes, subject: str) -> Finding:
        if (writer := self._state.uploads.claims.writer(name)) is not None:
            return Finding(subject, "being_written", f"by {writer.name}, pid {writer.pid} of {writer.tenant}")
        if (event := self._state.events.evicted(name)) is not None:
            why = "by an operator" if event.detail == "operator" else "to make room"
            return Finding(subject, "evicted", f"{why}, {time.time() - event.at_s:.0f} s ago")
        return Finding(subject, "missing", "never stored, or evicted longer ago than is remembered")

    def _session(self, session: Session) -> list[Finding]:
        worker = session.worker
        slots = ", ".join(map(str, sorted(session.slots))) or "none"
        detail = (
            f"{session.tokens} tokens in {len(session.packs)} packs; slots: {slots}; of {worker.name}, {worker.tenant}"
        )
        findings = [Finding(f"session {session.session_id}", "open", detail), self._speed(session)]
        damaged = [row for row in session.packs if self._state.catalog.served(row.ref.pack_id) is None]
        return findings + [self._pack(row.ref.pack_id) for row in damaged[:FINDINGS_MAX]]

    def _speed(self, session: Session) -> Finding:
        """Of the worker's tickets since anybody asked before, from a bounded trace of all workers."""
        trace = self._state.plane.drain_trace()
        took_us = (trace[trace[:, 0] >> np.uint64(16) == (session.worker.native_id or 0)][:, [5, 3]]).astype(np.int64)
        stats = self._state.plane.stats()
        looked = stats["extent_hits"] + stats["extent_misses"]
        cold = f"{stats['extent_misses']} of {looked} extents came from disk, over all workers since the start"
        if not len(took_us):
            return Finding(f"worker {session.worker.name}", "idle", f"no ticket since the last question; {cold}")
        times_us = (took_us[:, 0] - took_us[:, 1]) / 1e3
        return Finding(
            f"worker {session.worker.name}", "working",
            f"{len(times_us)} tickets, median {np.median(times_us):.0f} us, slowest {times_us.max():.0f} us; {cold}",
        )  # fmt: skip
