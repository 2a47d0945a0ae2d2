"""`always` (InfiniGen): every head selects anew at every step."""

from decode_worker.policy.reuse.base import REUSES, Reuse

REUSES.register("always")(Reuse(by_label=False))
