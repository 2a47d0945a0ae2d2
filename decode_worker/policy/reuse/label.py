"""`label` (LiteCache §4): a set is kept while the query stays similar to its label, at most until the tail is full."""

from decode_worker.policy.reuse.base import REUSES, Reuse

REUSES.register("label")(Reuse(by_label=True))
