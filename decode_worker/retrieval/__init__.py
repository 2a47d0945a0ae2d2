"""Which stored records a query wants: a retriever per file, by name in `base.RETRIEVERS`."""

from decode_worker.retrieval import exact, hash

__all__ = ["exact", "hash"]
