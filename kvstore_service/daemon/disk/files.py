"""Files of the data directory: their names, and what a start does with those that no row names.

Only names of our own pattern are ever touched. Whether the catalogue may judge them says the stamp beside it: the
catalogue's random id and how many commits it has seen. A stamp of another catalogue, or of more commits than this one
knows, means that the catalogue is new or an older copy; then what it does not know is moved to quarantine/.
"""

import contextlib
import logging
import os
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore_service.daemon.logs import event

PACK_NAME = re.compile(rb"[0-9a-f]{64}-[0-9a-f]{32}\.pack")
SIDECAR_NAME = re.compile(rb"[0-9a-f]{64}-[0-9a-f]{16}\.(?:sidecar|partial)")
_STAMP = re.compile(rb"([0-9a-f]{32}) (\d{20})\n")
_LOGGED_MAX = 20

log = logging.getLogger("kvstored.files")


@dataclass(frozen=True)
class Sweep:
    """What a look at one directory found. `lost`: keys of rows whose file is not there, sorted."""

    removed: list[str]
    quarantined: list[str]
    lost: NDArray[np.uint64]


def key_of(name: bytes) -> int:
    """64 random bits of a name: of its id or digest, and of its build or nonce."""
    return int(name[:16], 16) ^ int(name[65:81], 16)


def sweep(directory: Path, pattern: re.Pattern[bytes], known: NDArray[np.uint64], quarantine: Path | None) -> Sweep:
    """Compares the names in `directory` with the sorted keys of the rows. A regular file of our pattern that no row
    names was never acknowledged, or its row has ended: it is removed, or moved to `quarantine` if that is given.

    Holds 8 B per file, not their names. The chance that a leftover passes for known is 2**-64 per pair."""
    found = np.sort(np.frombuffer(array("Q", (key_of(entry.name) for entry in _ours(directory, pattern))), np.uint64))
    removed: list[str] = []
    quarantined: list[str] = []
    for path in _named(directory, pattern, set(_beyond(found, known).tolist())):
        if quarantine is None:
            path.unlink()
            removed.append(path.name)
        else:
            quarantine.mkdir(mode=0o700, exist_ok=True)
            path.rename(quarantine / path.name)
            quarantined.append(path.name)
    return Sweep(removed, quarantined, _beyond(known, found))


def _beyond(keys: NDArray[np.uint64], others: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Those of `keys` that are not among `others`, both sorted; cheaper than NumPy's setdiff1d, which sorts again."""
    if not len(others):
        return keys
    places = np.minimum(np.searchsorted(others, keys), len(others) - 1)
    return keys[others[places] != keys]


def strangers(directory: Path, pattern: re.Pattern[bytes], known: NDArray[np.uint64]) -> Iterator[Path]:
    """Regular files in `directory` that no row names, ours and others'."""
    keys = set(known.tolist())
    with os.scandir(os.fsencode(directory)) as entries:
        for entry in entries:
            ours = pattern.fullmatch(entry.name) is not None
            if not (ours and key_of(entry.name) in keys) and entry.is_file(follow_symlinks=False):
                yield directory / os.fsdecode(entry.name)


def _named(directory: Path, pattern: re.Pattern[bytes], keys: set[int]) -> Iterator[Path]:
    """Regular files of our pattern with one of the keys."""
    for entry in _ours(directory, pattern) if keys else ():
        if key_of(entry.name) in keys and entry.is_file(follow_symlinks=False):
            yield directory / entry.name.decode()


def _ours(directory: Path, pattern: re.Pattern[bytes]) -> Iterator[os.DirEntry[bytes]]:
    with os.scandir(os.fsencode(directory)) as entries:
        yield from (entry for entry in entries if pattern.fullmatch(entry.name))


def ours(directory: Path, pattern: re.Pattern[bytes]) -> Iterator[Path]:
    """Paths in `directory` that bear a name of ours."""
    return (directory / entry.name.decode() for entry in _ours(directory, pattern))


class Stamp:
    """How far the catalogue had come, kept outside of it. One line, overwritten in place."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)

    def vouches_for(self, catalog_id: str, commits: int) -> bool:
        """False if another catalogue has written it, or this one at a later time."""
        match = _STAMP.fullmatch(os.pread(self._fd, 100, 0))
        return match is not None and match[1].decode() == catalog_id and int(match[2]) <= commits

    def write(self, catalog_id: str, commits: int) -> None:
        """Not synced: a stamp that a power cut sets back is an older one, which still vouches."""
        os.pwrite(self._fd, b"%s %020d\n" % (catalog_id.encode(), commits), 0)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.fsync(self._fd)
        os.close(self._fd)


def report(sweeps: Iterable[Sweep], quarantine: Path) -> None:
    """One line per file up to a limit, and what to do."""
    removed = [name for found in sweeps for name in found.removed]
    quarantined = [name for found in sweeps for name in found.quarantined]
    for name in removed[:_LOGGED_MAX]:
        event(log, logging.WARNING, "unfinished file removed", file=name)
    if len(removed) > _LOGGED_MAX:
        event(log, logging.WARNING, "unfinished files removed", files=len(removed))
    if quarantined:
        event(
            log, logging.ERROR, "the catalogue is new or older than the files; moved what it does not know",
            files=len(quarantined), to=quarantine, fix="kvstored rebuild",
        )  # fmt: skip


def remove_file(path: Path) -> None:
    """Removes a file that no row names. If that fails the next start does it: what was done before stands."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        event(log, logging.ERROR, "file not removed", file=path, error=error)


def sync_directory(directory: Path) -> None:
    """Makes names in `directory` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
