"""Who writes a pack first, so that the others wait. A hint: the commit decides."""

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvstore_service.daemon.store.registry import Worker


@dataclass
class _Progress:
    """Of a worker: how its uploads looked when they last changed, and when that was."""

    looks: tuple[tuple[int, int], ...] = ()
    at_s: float = field(default_factory=time.monotonic)


class Claims:
    """Thread-safe. What a worker has claimed is free again once its uploads have stood still for `stall_s`."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._writers: dict[bytes, Worker] = {}  # by pack id
        self._progress: dict[Worker, _Progress] = {}

    def take(self, worker: Worker, names: Sequence[bytes], compete: bool) -> set[bytes]:
        """From here on the other packs are this worker's to write. Returns those that another worker is writing; none
        if it wants to `compete`."""
        with self._lock:
            writers = {} if compete else {name: self._writers[name] for name in names if name in self._writers}
            elsewhere = {
                name for name, writer in writers.items()
                if writer is not worker and not writer.gone and self._idle_s(writer) < self._stall_s
            }  # fmt: skip
            self._writers.update((name, worker) for name in names if name not in elsewhere)
            self._progress.setdefault(worker, _Progress())
        return elsewhere

    def give_up(self, worker: Worker, names: Iterable[bytes]) -> None:
        """What this worker is not writing any more is the next one's that asks."""
        with self._lock:
            for name in names:
                if self._writers.get(name) is worker:
                    del self._writers[name]

    def looked(self, worker: Worker, looks: tuple[tuple[int, int], ...]) -> float:
        """How the worker's uploads look now. Returns for how many seconds they have looked like that."""
        with self._lock:
            progress = self._progress.setdefault(worker, _Progress())
            if looks != progress.looks:
                progress.looks, progress.at_s = looks, time.monotonic()
            return time.monotonic() - progress.at_s

    def idle_s(self, worker: Worker) -> float:
        """Since the worker made progress with any upload."""
        with self._lock:
            return self._idle_s(worker)

    def forget_others(self, writing: Collection[Worker]) -> None:
        """Starts the progress of these workers, if it has not begun; ends that of all others."""
        with self._lock:
            self._progress = {worker: self._progress.get(worker, _Progress()) for worker in writing}

    def forget(self, worker: Worker) -> None:
        with self._lock:
            self._progress.pop(worker, None)

    def names(self) -> list[bytes]:
        """Ids of the packs that are being written."""
        with self._lock:
            return list(self._writers)

    def writer(self, name: bytes) -> Worker | None:
        with self._lock:
            return self._writers.get(name)

    def _idle_s(self, worker: Worker) -> float:
        progress = self._progress.get(worker)
        return 0.0 if progress is None else time.monotonic() - progress.at_s
