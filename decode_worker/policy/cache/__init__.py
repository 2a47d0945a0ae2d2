"""What stays in a head's window, and who goes: a rule per file, by name in `base.CACHES`."""

from decode_worker.policy.cache import exact_set, lru, whole_set

__all__ = ["exact_set", "lru", "whole_set"]
