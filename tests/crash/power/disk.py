"""The crash model's disk, preloaded into this process (csrc/shim/crash_model.h): begun once, for one directory."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NoReturn

# CrashFault in csrc/shim/crash_disk.h.
FAULTS = {
    "old blocks": 1,
    "garbage blocks": 2,
    "torn blocks": 4,
    "unreadable blocks": 8,
    "old sizes": 16,
    "old names": 32,
    "short transfers": 64,
    "shuffled transfers": 128,
}
CRASHED = 86  # the exit status of a process whose disk has crashed
BLOCK_BYTES = 4096

_model = ctypes.CDLL(None)


def begin(root: Path, aside: Path, seed: int, crash_at: int, faults: set[str]) -> None:
    """From here on the files below `root` are the model's; with change or sync number `crash_at` it crashes (0: not by
    itself). What cannot be read since an earlier crash is kept in `aside`."""
    bits = sum(FAULTS[fault] for fault in faults)
    _model.crash_model_begin(
        bytes(root), bytes(aside), ctypes.c_uint64(seed), ctypes.c_uint64(crash_at), ctypes.c_uint32(bits)
    )


def crash() -> NoReturn:
    """The power goes now."""
    _model.crash_model_crash()
    raise AssertionError("the process outlived its disk")


def crash_within(steps: int) -> None:
    """With the change or sync of that number, counted from now."""
    _model.crash_model_crash_within(ctypes.c_uint64(steps))


def unreadable(aside: Path) -> list[tuple[Path, int]]:
    """(file, block) of what the last crash left so."""
    listed = aside / "unreadable"
    lines = [line.split(" ", 1) for line in listed.read_text().splitlines()] if listed.exists() else []
    return [(Path(path), int(block)) for block, path in lines]
