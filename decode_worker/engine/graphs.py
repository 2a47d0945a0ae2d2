"""Lines of launches as graphs of the device, one for each line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Hashable

from decode_worker.device import Device, Graph

_log = logging.getLogger(__name__)


class Graphs:
    """A line's first run is made launch by launch, which compiles its kernels; the second captures it, and from then on
    it is replayed. So a line must always be the same launches, whatever its tensors hold. One that cannot be captured
    stays launch by launch, which is said once.

    `capturing`: what is launched now is recorded, and does not run."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._compiled: set[Hashable] = set()
        self._captured: dict[Hashable, Graph | None] = {}
        self.capturing = False

    def run(self, name: Hashable, launch: Callable[[], None]) -> None:
        """`launch` makes the launches of the line of that name."""
        if name in self._compiled and name not in self._captured:
            self._captured[name] = self._capture(name, launch)
        graph = self._captured.get(name)
        if graph is not None:
            graph.replay()
            return
        launch()
        self._compiled.add(name)

    def _capture(self, name: Hashable, launch: Callable[[], None]) -> Graph | None:
        graph = self._device.graph()
        outside = sys.exception()
        self.capturing = True
        try:
            graph.capture(launch)
        except Exception as error:
            cause = error
            # The end of a broken capture fails, too.
            while isinstance(cause.__context__, Exception) and cause.__context__ is not outside:
                cause = cause.__context__
            _log.warning("the launches %r cannot be captured, and stay slower: %s", name, cause)
            return None
        finally:
            self.capturing = False
        return graph

    def clear(self) -> None:
        """Forgets all, before what they launch on is gone."""
        self._compiled.clear()
        self._captured.clear()
