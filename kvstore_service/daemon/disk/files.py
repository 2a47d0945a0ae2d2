"""Files of the data directory: their names, and what a start does with those that no row names.

Only names of our own pattern are ever touched. Whether the catalogue may judge them says the stamp beside it: the
catalogue's random id and how many commits it has seen. A stamp of another catalogue, or of more commits than this one
knows, means that the catalogue is new or an older copy; then what it does not know is moved to quarantine/.
"""

import contextlib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore_service.daemon.logs import event

PACK_NAME = re.compile(rb"[0-9a-f]{64}-[0-9a-f]{32}\.pack")
SIDECAR_NAME = re.compile(rb"[0-9a-f]{64}-[0-9a-f]{16}\.(?:sidecar|partial)")
_STAMP = re.compile(rb"([0-9a-f]{32}) (\d{20})\n")
_RANDOM_DIGITS = np.r_[0:16, 65:81]  # of a name of ours
_CHUNK_ENTRIES = 1 << 14
_LOGGED_MAX = 20
_NO_KEYS = np.zeros(0, np.uint64)

log = logging.getLogger("kvstored.files")


@dataclass(frozen=True)
class Sweep:
    """What a look at one directory found: how many files went where,
    and the keys of rows whose file is not there, sorted."""

    removed: int
    quarantined: int
    lost: NDArray[np.uint64]


def keys_of(names: Sequence[bytes]) -> NDArray[np.uint64]:
    """Of each name of one pattern of ours 64 random bits: of its id or digest, and of its build or nonce."""
    if not names:
        return _NO_KEYS
    letters = np.frombuffer(b"".join(names), np.uint8).reshape(len(names), -1)
    return folded(bytes.fromhex(letters[:, _RANDOM_DIGITS].tobytes().decode()))


def folded(halves: bytes) -> NDArray[np.uint64]:
    """Keys, from the first 8 bytes of both parts of each name."""
    pairs = np.frombuffer(halves, ">u8").reshape(-1, 2)
    return (pairs[:, 0] ^ pairs[:, 1]).astype(np.uint64)


def keys_in(directory: Path, pattern: re.Pattern[bytes]) -> NDArray[np.uint64]:
    """The keys of the names of ours, sorted: 8 B per file."""
    return in_order(keys for _, keys in _keyed(directory, pattern))


def in_order(parts: Iterable[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """All keys of all parts, sorted."""
    return np.sort(np.concatenate([_NO_KEYS, *parts]))


def sweep(
    directory: Path,
    pattern: re.Pattern[bytes],
    found: NDArray[np.uint64],
    known: NDArray[np.uint64],
    quarantine: Path | None,
) -> Sweep:
    """Compares the keys of what is in `directory` with those of the rows. A regular file of our pattern that no row
    names was never acknowledged, or its row has ended: it is removed, or moved to `quarantine` if that is given.

    The chance that a leftover passes for known is 2**-64 per pair."""
    strange = found[~among(found, known)]
    moved = 0
    for path in _named(directory, pattern, strange):
        fate = "unfinished file removed" if quarantine is None else "unknown file quarantined"
        if quarantine is None:
            path.unlink()
        else:
            quarantine.mkdir(mode=0o700, exist_ok=True)
            path.rename(quarantine / path.name)
            path.unlink(missing_ok=True)  # if it lay there already: of two names of one file none is renamed
        moved += 1
        if moved <= _LOGGED_MAX:
            event(log, logging.WARNING, fate, file=path.name)
    lost = known[~among(known, found)]
    return Sweep(moved, 0, lost) if quarantine is None else Sweep(0, moved, lost)


def among(keys: NDArray[np.uint64], known: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which of `keys` stand in `known`, which is sorted."""
    if not len(known):
        return np.zeros(len(keys), np.bool_)
    places = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return known[places] == keys


def strangers(directory: Path, pattern: re.Pattern[bytes], known: NDArray[np.uint64]) -> Iterator[Path]:
    """Regular files in `directory` that no row names, ours and others'."""
    for entries in _chunks(directory):
        own, keys = _ours_of(entries, pattern)
        named = {own[index].name for index in np.flatnonzero(among(keys, known))}
        for entry in entries:
            if entry.name not in named and entry.is_file(follow_symlinks=False):
                yield directory / os.fsdecode(entry.name)


def ours(directory: Path, pattern: re.Pattern[bytes]) -> Iterator[Path]:
    """Paths in `directory` that bear a name of ours."""
    for entries in _chunks(directory):
        yield from (directory / entry.name.decode() for entry in _ours_of(entries, pattern)[0])


def _named(directory: Path, pattern: re.Pattern[bytes], wanted: NDArray[np.uint64]) -> Iterator[Path]:
    """Regular files of our pattern with one of the keys, which are sorted."""
    for entries, keys in _keyed(directory, pattern) if len(wanted) else ():
        for index in np.flatnonzero(among(keys, wanted)):
            if entries[index].is_file(follow_symlinks=False):
                yield directory / entries[index].name.decode()


def _keyed(
    directory: Path, pattern: re.Pattern[bytes]
) -> Iterator[tuple[list[os.DirEntry[bytes]], NDArray[np.uint64]]]:
    """Entries with names of ours, each with its key, many at a time."""
    return (_ours_of(entries, pattern) for entries in _chunks(directory))


def _ours_of(
    entries: list[os.DirEntry[bytes]], pattern: re.Pattern[bytes]
) -> tuple[list[os.DirEntry[bytes]], NDArray[np.uint64]]:
    """Those of our pattern, with their keys. One match for all of them costs a third of one for each."""
    names = [entry.name for entry in entries]
    if not re.fullmatch(rb"(?:%b/)*+" % pattern.pattern, b"/".join([*names, b""])):
        entries = [entry for entry in entries if pattern.fullmatch(entry.name)]
        names = [entry.name for entry in entries]
    return entries, keys_of(names)


def _chunks(directory: Path) -> Iterator[list[os.DirEntry[bytes]]]:
    with os.scandir(os.fsencode(directory)) as entries:
        while chunk := list(islice(entries, _CHUNK_ENTRIES)):
            yield chunk


class Stamp:
    """How far the catalogue had come, kept outside of it. One line, overwritten in place."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = self._opened()

    def _opened(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(self._path, flags, 0o600)

    def vouches_for(self, catalog_id: str, commits: int) -> bool:
        """False if another catalogue has written it, or this one at a later time. One that cannot be read, which a
        power cut may leave, vouches for nothing and is made anew: it could not be overwritten either."""
        try:
            match = _STAMP.fullmatch(os.pread(self._fd, 100, 0))
        except OSError as error:
            event(log, logging.ERROR, "stamp made anew", file=self._path, error=error)
            os.close(self._fd)
            self._path.unlink()
            self._fd = self._opened()
            return False
        return match is not None and match[1].decode() == catalog_id and int(match[2]) <= commits

    def write(self, catalog_id: str, commits: int) -> None:
        """Not synced: a stamp that a power cut sets back is an older one, which still vouches."""
        os.pwrite(self._fd, b"%s %020d\n" % (catalog_id.encode(), commits), 0)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.fsync(self._fd)
        os.close(self._fd)


def report(sweeps: Iterable[Sweep], quarantine: Path) -> None:
    """How many files there were, beyond those of which each has its line, and what to do."""
    found = list(sweeps)
    removed, quarantined = sum(item.removed for item in found), sum(item.quarantined for item in found)
    if removed > _LOGGED_MAX:
        event(log, logging.WARNING, "unfinished files removed", files=removed)
    if quarantined:
        event(
            log, logging.ERROR, "the catalogue is new or older than the files; moved what it does not know",
            files=quarantined, to=quarantine, fix="kvstored rebuild",
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
