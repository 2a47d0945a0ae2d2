"""The protocol holds in every specification, and each planted bug breaks the property that is meant to catch it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_PATH = Path(__file__).resolve().parent.parent / "scripts" / "protocol_check.py"
_SPEC = importlib.util.spec_from_file_location("protocol_check", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
protocol_check = importlib.util.module_from_spec(_SPEC)
sys.modules["protocol_check"] = protocol_check
_SPEC.loader.exec_module(protocol_check)


@pytest.mark.parametrize("check", protocol_check.CHECKS, ids=lambda check: check.name)
def test_specification(check: protocol_check.Check) -> None:
    try:
        result = protocol_check.verify(check)
    except protocol_check.ProtocolCheckError as error:
        pytest.fail(str(error), pytrace=False)
    assert result.found == check.expect


def test_every_specification_and_variant_is_checked() -> None:
    """A planted bug that nobody runs proves nothing."""
    for path in protocol_check.SPECS.glob("*.pml"):
        text = path.read_text()
        checks = [check for check in protocol_check.CHECKS if check.spec == path.stem]
        assert any(not check.variant for check in checks)
        assert all(check.variant in text for check in checks)
        assert ("\nltl " in text) == any(check.liveness for check in checks)
