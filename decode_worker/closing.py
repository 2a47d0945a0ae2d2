"""The end of several things that are given back together."""

from __future__ import annotations

from collections.abc import Callable


def close_all(*closes: Callable[[], object]) -> None:
    """Calls each in its order, whatever another raises; the first error is raised behind the last."""
    first: BaseException | None = None
    for close in closes:
        try:
            close()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first
