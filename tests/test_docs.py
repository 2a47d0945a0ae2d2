"""The documentation against the code: generated tables, links and commands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore_service.daemon.config import KEYS
from kvstore_service.daemon.server import END_S

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("models/*.md")])


def test_the_tables_of_operations_are_the_codes() -> None:
    command = [sys.executable, "scripts/reference.py", "--check"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    """`folder/file.ext` in backquotes, from the root or from the page's folder."""
    named = re.findall(
        r"`((?:bench|csrc|deploy|docs|examples|models|proto|scripts|tests)/[\w./-]+\.\w+)`", page.read_text()
    )
    missing = [name for name in named if not (ROOT / name).exists()]
    assert missing == []


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"`make (\w+)|^make (\w+)", page.read_text(), re.MULTILINE))
        assert {first or second for first, second in named} <= targets, page.name


def test_the_service_is_given_the_time_that_it_takes_to_end() -> None:
    unit = (ROOT / "deploy/kvstored.service").read_text()
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    (drain_s,) = (key.default() for key in KEYS if key.name == "drain_s" and key.default)
    assert int(stop_s) > drain_s + END_S
