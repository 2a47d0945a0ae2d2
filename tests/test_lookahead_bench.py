"""The benchmark of looking ahead, at its smallest size: every case stands beside `off`, in both halves."""

import pytest
import torch

from bench import lookahead
from decode_worker.model.checkpoint import Checkpoint
from tests.test_bench import SMALL, printed

CASES = ("off", "next", "2")


def test_every_case_has_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    settings = lookahead.Settings(CASES, dram=0.5, shape=SMALL, tokens=8192, budget=0.1, steps=4, rounds=2)
    shown = {figure["name"]: figure for figure in printed(lookahead.measure(settings), capsys)}
    for part in ("", "in_dram."):
        for case in CASES:
            assert shown[f"{part}step_ms.{case}"]["rival"] == "off"
            assert shown[f"{part}late_bytes.{case}"]["value"] <= shown[f"{part}read_bytes.{case}"]["value"]
        assert shown[f"{part}hinted.next"]["value"] > 0
    assert shown["in_dram.read_bytes.off"]["value"] == 0


def test_neighbouring_tokens_are_alike(tmp_path) -> None:
    directory = lookahead.drifting_checkpoint(tmp_path, SMALL, turn=6.0)
    embedding = Checkpoint.open(directory).weights(torch.float32, torch.device("cpu")).embedding
    cosines = torch.nn.functional.cosine_similarity(embedding[:-1], embedding[1:])
    assert (cosines > 0.97).all()
    assert torch.nn.functional.cosine_similarity(embedding[0], embedding[100], dim=0) < 0.6
