"""`whole_set` (LiteCache's own): a miss fetches its whole set."""

from decode_worker.policy.cache.base import CACHES, Cache

CACHES.register("whole_set")(Cache(keeps=False, whole=True))
