"""Lines of launches as graphs of the device, one for each line."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from decode_worker.device import Device, Graph


class Graphs:
    """A line's first run is made launch by launch, which compiles its kernels; the second captures it, and from then on
    it is replayed. So a line must always be the same launches, whatever its tensors hold."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._seen: set[Hashable] = set()
        self._captured: dict[Hashable, Graph] = {}

    def run(self, name: Hashable, launch: Callable[[], None]) -> None:
        """`launch` makes the launches of the line of that name."""
        if name not in self._seen:
            self._seen.add(name)
            launch()
            return
        if name not in self._captured:
            graph = self._device.graph()
            graph.capture(launch)
            self._captured[name] = graph
        self._captured[name].replay()

    def clear(self) -> None:
        """Forgets all, before what they launch on is gone."""
        self._seen.clear()
        self._captured.clear()
