"""What soak runs have counted so far, in bench/results/reliability.json: one object per kind of fault.

    add_run("daemon_sigkill", minutes=60.0, seed=7, kills=1500, lost=0, restart_s_median=0.3, restart_s_max=0.9)

{kind: {"total": {...}, "runs": [one line each]}}. The total follows from the runs alone: figures called *_max give
their largest, *_median their median, and all others but `seed` add up. A merge of two such files keeps the lines of
both; the next run puts the total right.
"""

import datetime
import fcntl
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decode_worker import figures

RESULTS = Path(__file__).parents[2] / "bench/results/reliability.json"
_NOT_TOTALLED = ("date", "commit", "machine", "seed")
_COMMIT = figures.commit()  # of the code that this process runs, whatever is committed meanwhile


def add_run(kind: str, results: Path = RESULTS, **run: float) -> dict[str, Any]:
    """Adds one run to its kind and returns the kind's new total. Safe against another run that ends at once."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    results.parent.mkdir(parents=True, exist_ok=True)
    directory = os.open(results.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        kinds = json.loads(results.read_text()) if results.exists() else {}
        runs = kinds.setdefault(kind, {"runs": []})["runs"]
        runs.append({"date": today, "commit": _COMMIT, "machine": figures.machine(), **run})
        kinds[kind] = {"total": total(runs), "runs": runs}
        partial = results.with_suffix(".partial")
        partial.write_text(_text(kinds))
        partial.replace(results)
    finally:
        os.close(directory)
    return dict(kinds[kind]["total"])


def total(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    sums: dict[str, float] = {"runs": len(runs)}
    for name in dict.fromkeys(name for run in runs for name in run if name not in _NOT_TOTALLED):
        values = [run[name] for run in runs if name in run]
        join = max if name.endswith("_max") else statistics.median if name.endswith("_median") else sum
        sums[name] = round(join(values), 3)
    return sums


def _text(kinds: dict[str, Any]) -> str:
    objects = []
    for kind, content in sorted(kinds.items()):
        runs = ",\n".join(f"      {json.dumps(run)}" for run in content["runs"])
        head = f'  {json.dumps(kind)}: {{\n    "total": {json.dumps(content["total"])},\n    "runs": [\n'
        objects.append(f"{head}{runs}\n    ]\n  }}")
    return "{\n" + ",\n".join(objects) + "\n}\n"
