"""When a head selects again."""

from dataclasses import dataclass

from decode_worker.kernels.registry import Registry


@dataclass(frozen=True)
class Reuse:
    """`by_label`: a head keeps its set while its query is similar to the one that selected it; else never."""

    by_label: bool


REUSES: Registry[Reuse] = Registry("reuse")
