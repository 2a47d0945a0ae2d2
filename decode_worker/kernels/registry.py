"""Things chosen by name: each registers itself, and the choices of a flag are all names."""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """`registry[name]` is what registered under that name; `noun` is the setting that chooses, for errors."""

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._known: dict[str, T] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._known)

    def register(self, name: str) -> Callable[[T], T]:
        def remember(thing: T) -> T:
            if self._known.setdefault(name, thing) is not thing:
                raise ValueError(f"{self._noun}={name!r} is registered twice")
            return thing

        return remember

    def __getitem__(self, name: str) -> T:
        if name not in self._known:
            raise KeyError(f"{self._noun}={name!r}: known are {', '.join(self._known)}")
        return self._known[name]
