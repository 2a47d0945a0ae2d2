"""`exact_set` (ours): the window holds the set that is attended to; a miss fetches what its new set has not in common
with the old one (delta fetch)."""

from decode_worker.policy.cache.base import CACHES, Cache

CACHES.register("exact_set")(Cache(keeps=False))
