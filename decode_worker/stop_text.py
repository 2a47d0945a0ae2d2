"""Stop strings: where a generated text ends before its tokens do."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Passes text on until one of `stops` occurs in it, which is not passed on; holds back what may begin one.

    ValueError for an empty stop string: it would end every text before its first character."""

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty; give the text that ends a generation")
        self._stops = tuple(stops)
        self._held = ""
        self.reached = False

    def push(self, text: str) -> str:
        """What may be shown now; after `reached` there is no more."""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.reached = True
            return self._show(min(found))
        return self._show(len(self._held) - self._beginning())

    def finish(self) -> str:
        """What was held back, when the text has ended for another reason."""
        return self._show(len(self._held))

    def _show(self, count: int) -> str:
        shown, self._held = self._held[:count], "" if self.reached else self._held[count:]
        return shown

    def _beginning(self) -> int:
        """Characters at the end of the text that a stop string begins with."""
        counts = (n for stop in self._stops for n in range(len(stop) - 1, 0, -1) if self._held.endswith(stop[:n]))
        return max(counts, default=0)
