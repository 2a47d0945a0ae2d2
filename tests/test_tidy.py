"""The repository against its rules, and each rule against a small tree that breaks it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.tidy import BLOB_BYTES_MAX, RULES, Tree

ROOT = Path(__file__).parents[1]
RULE = {rule.__name__: rule for rule in RULES}

CLEAN = {
    "README.md": "See [the plan](docs/plan.md). Run `python -m bench.speed`.\n",
    "docs/plan.md": "A plan.\n",
    "CMakeLists.txt": "file(GLOB SOURCES CONFIGURE_DEPENDS csrc/*.cc)\n",
    "csrc/ring.h": "// A ring.\ninline constexpr int kSlots = 4;\nstruct Ring {\n  int slots = kSlots;\n};\n",
    "csrc/ring.cc": '#include "ring.h"\nint slots(const Ring& ring) { return ring.slots; }\n',
    "decode_worker/engine.py": "import logging\n\nSIZE = 2\n\n\nclass Handler(logging.Handler):\n"
    "    def emit(self, record):\n        return SIZE\n",
    "bench/speed.py": "from decode_worker.engine import Handler\n\nHandler()\n",
    "Makefile": "all:\n\ttrue\n",
}
BROKEN: list[tuple[str, str, str, str]] = [
    ("blanks", "docs/plan.md", "A plan. \n", "docs/plan.md:1: space"),
    ("blanks", "docs/plan.md", "A\tplan.\n", "docs/plan.md:1: tab"),
    ("blanks", "docs/plan.md", "A plan.", "docs/plan.md: does not end"),
    ("blanks", "docs/plan.md", "A plan.\n\n", "docs/plan.md: does not end"),
    ("long_lines", "csrc/ring.cc", f"// {'x' * 120}\n", "csrc/ring.cc:1: 123 columns"),
    ("long_lines", "bench/speed.py", f"{'x' * 121}  # noqa\n", "bench/speed.py:1: "),
    ("blobs", "docs/plan.md", "x" * (BLOB_BYTES_MAX + 1), f"docs/plan.md: {BLOB_BYTES_MAX + 1} bytes"),
    ("home_paths", "docs/plan.md", "Look at /home/" + "somebody/notes.\n", "docs/plan.md:1: a path"),
    ("home_paths", "Makefile", "cache=/" + "root/.cache\n", "Makefile:1: a path"),
    ("ragged_comments", "csrc/ring.cc", "// A ring has\n// slots for each.\n", "csrc/ring.cc:1: the comment"),
    ("ragged_comments", "bench/speed.py", "# It is made of\n# many parts\n", "bench/speed.py:1: the comment"),
    ("orphans", "docs/lost.md", "Nobody links it.\n", "docs/lost.md: no other file"),
    ("orphans", "decode_worker/lost.py", "import json\n", "decode_worker/lost.py: no other file"),
    ("orphans", "csrc/lost.h", "struct Lost;\n", "csrc/lost.h: no other file"),
    ("orphans", "scripts/lost.sh", "true  # lost.sh\n", "scripts/lost.sh: no other file"),
    ("dead_names", "decode_worker/engine.py", "def lost():\n    return 1\n", "engine.py:1: nothing refers to lost"),
    ("dead_names", "decode_worker/engine.py", "class Lost:\n    pass\n", "engine.py:1: nothing refers to Lost"),
    ("dead_names", "decode_worker/engine.py", "LOST = 1\n", "engine.py:1: nothing refers to LOST"),
    ("dead_names", "bench/speed.py", "class Handler:\n    def lost(self):\n        return 1\n\n\nHandler()\n",
     "speed.py:2: nothing refers to lost"),
    ("dead_names", "csrc/ring.h", "inline constexpr int kLost = 4;\nstruct Ring {};\n", "nothing refers to kLost"),
    ("dead_names", "csrc/ring.h", "struct Lost {};\nstruct Ring {};\n", "nothing refers to Lost"),
]  # fmt: skip


def tree_of(files: Mapping[str, str]) -> Tree:
    return Tree({name: text.encode() for name, text in files.items()})


@pytest.fixture(scope="module")
def repository() -> Tree:
    return Tree.tracked(ROOT)


@pytest.mark.parametrize("rule", RULE)
def test_the_repository_keeps_the_rule(repository: Tree, rule: str) -> None:
    assert list(RULE[rule](repository)) == []


@pytest.mark.parametrize("rule", RULE)
def test_a_clean_tree_breaks_no_rule(rule: str) -> None:
    assert list(RULE[rule](tree_of(CLEAN))) == []


@pytest.mark.parametrize(("rule", "name", "text", "found"), BROKEN, ids=lambda value: value[:40].strip())
def test_a_broken_rule_is_found(rule: str, name: str, text: str, found: str) -> None:
    (finding,) = RULE[rule](tree_of({**CLEAN, name: text}))
    assert found in finding


def test_every_rule_has_a_tree_that_breaks_it() -> None:
    assert {rule for rule, *_ in BROKEN} == set(RULE)
