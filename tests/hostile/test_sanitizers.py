"""The data plane's tests and the fuzzer's corpus once more, over builds that report wild accesses and data races."""

import subprocess
import sys
from collections.abc import Iterator
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


class Sanitized:
    """The data plane's tests over one build, begun."""

    def __init__(self, sanitizer: str, directory: Path) -> None:
        self._report, self._said = directory / "report", directory / "said"
        (module,) = (FOLDERS[sanitizer] / "kvstore_service").glob("_native.*.so")
        with self._said.open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.hostile.sanitized", module, "tests/dataplane", "-q",
                 "-k", CHOSEN, "-p", "no:cacheprovider", f"--basetemp={directory}/tests"],
                cwd=ROOT, env=sanitized.environment(sanitizer, self._report), stdout=said, stderr=said,
            )  # fmt: skip

    def end(self) -> None:
        assert self.process.wait(600) is not None
        assert not found(self._report), found(self._report)
        assert self.process.returncode == 0, self._said.read_text()[-12000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Sanitized]]:
    """Both at a time: much of what they test is waiting."""
    for sanitizer, folder in FOLDERS.items():
        sanitized.build(folder, sanitizer, "store_native")
    begun = {sanitizer: Sanitized(sanitizer, tmp_path_factory.mktemp(sanitizer)) for sanitizer in FOLDERS}
    yield begun
    for run in begun.values():
        run.process.kill()
        run.process.wait(10)


@pytest.mark.timeout(900)  # the first time both are built
@pytest.mark.parametrize("sanitizer", FOLDERS)
def test_the_data_planes_tests_leave_no_report(runs: dict[str, Sanitized], sanitizer: str) -> None:
    runs[sanitizer].end()


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
