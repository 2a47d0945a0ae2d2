"""The protocol models hold, and each planted bug breaks the property that is meant to catch it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_PATH = Path(__file__).resolve().parent.parent / "scripts" / "model_check.py"
_SPEC = importlib.util.spec_from_file_location("model_check", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
model_check = importlib.util.module_from_spec(_SPEC)
sys.modules["model_check"] = model_check
_SPEC.loader.exec_module(model_check)


@pytest.mark.parametrize("check", model_check.CHECKS, ids=lambda check: check.name)
def test_model(check: model_check.Check) -> None:
    try:
        result = model_check.verify(check)
    except model_check.ModelCheckError as error:
        pytest.fail(str(error), pytrace=False)
    assert result.found == check.expect


def test_every_model_and_variant_is_checked() -> None:
    """A planted bug that nobody runs proves nothing."""
    for path in model_check.MODELS.glob("*.pml"):
        text = path.read_text()
        checks = [check for check in model_check.CHECKS if check.model == path.stem]
        assert any(not check.variant for check in checks)
        assert all(check.variant in text for check in checks)
        assert ("\nltl " in text) == any(check.liveness for check in checks)
