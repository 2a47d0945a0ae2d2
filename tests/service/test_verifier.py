"""The verifier's reads: right, and in memory that does not grow with what was read."""

import os
from contextlib import closing
from pathlib import Path

import psutil

from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.daemon.disk.verifier import CHUNK_BYTES, Verifier

FILES = 60
GROWTH_BYTES = 16 << 20


def test_memory_does_not_grow_with_the_files_that_were_read(tmp_path: Path) -> None:
    """Also of those that end too early, or that nobody reads to their end."""
    content = os.urandom(5 * CHUNK_BYTES + 4096)
    (path := tmp_path / "file").write_bytes(content)
    with closing(Catalog(tmp_path / "data")) as catalog, closing(Verifier(catalog, 0)) as verifier:
        assert b"".join(bytes(chunk) for chunk in verifier._chunks(path, len(content))) == content
        before = psutil.Process().memory_info().rss
        for number in range(FILES):
            chunks = verifier._chunks(path, len(content))
            assert bytes(next(chunks)) == content[:CHUNK_BYTES]
            if number % 2:
                assert b"".join(bytes(chunk) for chunk in chunks) == content[CHUNK_BYTES:]
            chunks.close()
        assert psutil.Process().memory_info().rss - before < GROWTH_BYTES
