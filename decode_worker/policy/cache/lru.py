"""`lru`: selected units stay; the one whose selection lies back longest goes first."""

from decode_worker.policy.cache.base import CACHES, Cache, Stamp

CACHES.register("lru")(Cache(keeps=True, stamp=Stamp.STEP))
