"""The windows, by name. One is imported when it is chosen: who only wants the names needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from decode_worker.kernels.registry import Registry

if TYPE_CHECKING:
    from decode_worker.window.base import Window

WINDOWS: Registry[Callable[[], type[Window]]] = Registry("window")


@WINDOWS.register("shm")
def _shm() -> type[Window]:
    from decode_worker.window.shm import ShmWindow

    return ShmWindow


@WINDOWS.register("bounce")
def _bounce() -> type[Window]:
    from decode_worker.window.bounce import BounceWindow

    return BounceWindow


@WINDOWS.register("staged")
def _staged() -> type[Window]:
    from decode_worker.window.staged import StagedWindow

    return StagedWindow


@WINDOWS.register("pull")
def _pull() -> type[Window]:
    from decode_worker.window.pull import PullWindow

    return PullWindow


@WINDOWS.register("gdr")
def _gdr() -> type[Window]:
    from decode_worker.window.gdr import GdrWindow

    return GdrWindow
