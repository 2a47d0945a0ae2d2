"""What may be true of a store after a crash: facts with the values that each of them may have.

It outlives the process that writes it, in the memory behind a descriptor. Before something is done its outcome is one
of the values that may be; once it is acknowledged it is the only one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

Value = bool | int | None


class Ledger:
    """`facts` by name; what stands in no entry is False."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.facts: dict[str, list[Value]] = {}
        size = os.fstat(fd).st_size
        for line in os.pread(fd, size, 0).decode().splitlines():
            self._take(*json.loads(line))

    def may_be(self, fact: str, value: Value) -> None:
        """From here on, until it is known again."""
        if value not in self.of(fact):
            self._write(fact, [*self.of(fact), value])

    def know(self, fact: str, value: Value) -> None:
        """It was acknowledged, or seen after a start."""
        if self.of(fact) != [value]:
            self._write(fact, [value])

    def see(self, fact: str, value: Value) -> None:
        """The store says so after a start. AssertionError if it may not be."""
        assert value in self.of(fact), f"{fact} is {value}; acknowledged or begun: {self.of(fact)}"
        self.know(fact, value)

    def of(self, fact: str) -> list[Value]:
        return self.facts.get(fact, [False])

    def known(self, prefix: str, value: Value) -> Iterator[str]:
        """The facts of this prefix that have that value for sure."""
        return (fact for fact, values in list(self.facts.items()) if fact.startswith(prefix) and values == [value])

    def _write(self, fact: str, values: list[Value]) -> None:
        self._take(fact, values)
        os.write(self._fd, f"{json.dumps([fact, values])}\n".encode())

    def _take(self, fact: str, values: list[Value]) -> None:
        self.facts[fact] = values
