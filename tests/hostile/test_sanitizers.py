"""The data plane's tests and the fuzzer's corpus once more, over builds that report wild accesses and data races."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile import sanitized
from tests.hostile.fuzz import CORPUS

ROOT = sanitized.ROOT
FOLDERS = {"address": ROOT / "build" / "asan", "thread": ROOT / "build" / "tsan"}


def found(report: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[:8000] for path in report.parent.glob(f"{report.name}.*"))


# How much processor time and memory is used says nothing here, and a ticket of 2^24 records takes up to a minute.
CHOSEN = "not cpu and not bounded_memory and not name_together"


@pytest.fixture(scope="module")
def modules() -> dict[str, Path]:
    """The native module of each build."""
    for sanitizer, folder in FOLDERS.items():
        sanitized.build(folder, sanitizer, "store_native")
    return {name: next((folder / "kvstore_service").glob("_native.*.so")) for name, folder in FOLDERS.items()}


@pytest.mark.timeout(1200)  # the first time both are built
@pytest.mark.parametrize("sanitizer", FOLDERS)
def test_the_data_planes_tests_leave_no_report(modules: dict[str, Path], sanitizer: str, tmp_path: Path) -> None:
    report = tmp_path / "report"
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.sanitized", modules[sanitizer], "tests/dataplane", "-q",
         "-k", CHOSEN, "-p", "no:cacheprovider", f"--basetemp={tmp_path}/tests"],
        cwd=ROOT, env=sanitized.environment(sanitizer, report), capture_output=True, text=True, timeout=900,
        check=False,
    )  # fmt: skip
    assert not found(report), found(report)
    assert done.returncode == 0, done.stdout[-12000:] + done.stderr[-4000:]


@pytest.mark.timeout(600)
def test_the_fuzzers_corpus_fails_nothing(tmp_path: Path) -> None:
    folder, report = FOLDERS["address"], tmp_path / "report"
    sanitized.build(folder, "address", "fuzz_requests")
    inputs = sorted(CORPUS.iterdir())
    assert inputs
    environment = {**sanitized.environment("address", report), "LD_PRELOAD": ""}
    done = subprocess.run(
        [folder / "fuzz_requests", *inputs], cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert not found(report), found(report)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == f"{len(inputs)} inputs replayed\n"
