"""When a head selects again: a rule per file, by name in `base.REUSES`."""

from decode_worker.policy.reuse import always, label

__all__ = ["always", "label"]
