"""How long calls took, by the class of their method."""

import threading
from bisect import bisect_left

BOUNDS_US = (100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000, 5_000_000)
CLASSES = {
    "LookupPrefix": "lookup",
    "CommitPack": "commit",
    "SealTail": "commit",
    "BindSlot": "bind",
    "UnbindSlot": "bind",
    "GetSidecar": "sidecar",
    "PutSidecar": "sidecar",
}
OTHER = "other"

Histogram = tuple[list[int], list[int], int]


class Latencies:
    """Histograms as the data plane has them: (upper bounds in us, counts and one for what took longer, sum in us).

    Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {name: [0] * (len(BOUNDS_US) + 1) for name in {*CLASSES.values(), OTHER}}
        self._sums_us = dict.fromkeys(self._counts, 0)

    def observe(self, method: str, took_s: float) -> None:
        """method: its whole path."""
        name = CLASSES.get(method.rpartition("/")[2], OTHER)
        took_us = int(took_s * 1e6)
        with self._lock:
            self._counts[name][bisect_left(BOUNDS_US, took_us)] += 1
            self._sums_us[name] += took_us

    def histograms(self) -> dict[str, Histogram]:
        with self._lock:
            return {name: (list(BOUNDS_US), list(self._counts[name]), self._sums_us[name]) for name in self._counts}
