"""Scripts in a process whose disk calls fail and stall on order."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


def shimmed(shim: Path, script: str, directory: Path) -> None:
    """Runs a script in a process whose data plane is the shim's build."""
    prologue = f"""
    import importlib.util, sys, time
    from pathlib import Path
    import numpy as np
    import kvstore_service
    found = importlib.util.spec_from_file_location("kvstore_service._native", {str(shim)!r})
    native = importlib.util.module_from_spec(found)
    sys.modules["kvstore_service._native"] = kvstore_service._native = native
    found.loader.exec_module(native)
    from tests.support.rig import ERROR, NO_PAIRS, OK, UNAVAILABLE, WAIT_US, Rig, run, until
    from decode_worker._native import OP_GATHER, OP_RANGE, OP_STORE
    rng, directory, SECOND = np.random.default_rng(0), Path({str(directory)!r}), 1_000_000
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(prologue) + textwrap.dedent(script)],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
