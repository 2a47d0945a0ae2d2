"""The benchmark of kept labels, at its smallest size: every figure stands beside `off`."""

import pytest

from bench import labels
from tests.test_bench import printed


@pytest.mark.timeout(180)
def test_every_case_stands_beside_off(capsys: pytest.CaptureFixture[str]) -> None:
    settings = labels.Settings(tokens=2048, answer=2, repeats=2)
    shown = {figure["name"]: figure for figure in printed(labels.measure(settings), capsys)}
    assert shown["end_ms.kept"]["rival"] == labels.RIVAL
    for case in ("again", "on"):
        for name in ("attach_ms", "first_step_ms", "first_step_ratio", "first_token_ms", "first_step_records"):
            assert shown[f"{name}.kept.{case}"]["rival"] == labels.RIVAL, name
        kept, off = (shown[f"first_step_records.{each}.{case}"]["value"] for each in ("kept", "off"))
        assert kept < off
