"""What a failure of the store means for a worker, and for the person who waits for its answer."""

from __future__ import annotations

from collections.abc import Callable

from decode_worker import _native
from decode_worker.config import WorkerConfig
from kvstore_service.client import StoreClient, StoreError

INTERRUPTED_S = 0.3
_LOST = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "UNAUTHENTICATED", "CANCELLED")
# A prefix that was found a moment ago is not what it was: a pack is damaged, evicted or written anew.
_STALE_PREFIX = ("DATA_LOSS", "NOT_FOUND", "FAILED_PRECONDITION")


def clean_up(error: BaseException, call: Callable[..., object], *arguments: object) -> bool:
    """Calls the store after `error`, which matters more than another one. Returns whether the call succeeded.

    Whoever interrupts waits no longer than a moment: the end of the connection releases everything anyway."""
    try:
        call(*arguments, timeout_s=None if isinstance(error, Exception) else INTERRUPTED_S)
    except StoreError:
        return False
    return True


def refused_for_now(error: StoreError) -> bool:
    """Full, or draining: the same call may succeed later."""
    return error.code == "RESOURCE_EXHAUSTED" or (error.code == "UNAVAILABLE" and error.retry_after_s is not None)


def is_lost(error: BaseException) -> bool:
    """Whether the store is gone or silent, so that what it was asked for another session would fail as well."""
    if isinstance(error, StoreError):
        return error.code in _LOST and not refused_for_now(error)
    return isinstance(error, _native.RingError)


def prefix_changed(error: BaseException) -> bool:
    """Whether a new lookup finds another, shorter prefix, without what this error was about."""
    return isinstance(error, StoreError) and error.code in _STALE_PREFIX


def explained(error: StoreError | _native.RingError, config: WorkerConfig, client: StoreClient | None) -> StoreError:
    """The same failure in words for the command's user: what happened to the daemon, and what to do."""
    if isinstance(error, StoreError) and error.code == "DATA_LOSS":
        fix = "damaged packs are out of service now; repeat the command, which writes them anew"
        return StoreError("DATA_LOSS", f"stored KV failed its checksum: {fix}")
    if isinstance(error, StoreError) and error.code not in _LOST:
        return error
    daemon = f"the daemon at {config.socket}"
    if client is not None and client.gone:
        return StoreError(
            "UNAVAILABLE", f"{daemon} has ended: start it again (kvstored) and repeat the command; its packs are kept"
        )
    if isinstance(error, StoreError) and refused_for_now(error):
        return StoreError(
            "UNAVAILABLE",
            f"{daemon} does not take this now ({error.message}): repeat the command when it serves again",
            error.retry_after_s,
        )
    if isinstance(error, StoreError) and error.code == "UNAVAILABLE" and client is None:
        return error
    return StoreError(
        "UNAVAILABLE",
        f"{daemon} has not answered for {config.wait_ms} ms: it is stopped or overloaded; "
        "see its log, or give it longer with --wait-ms",
    )
