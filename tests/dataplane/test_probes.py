"""PROBE: lines that say where they belong, into a worker's own window, whatever is bound."""

import numpy as np
import pytest

from decode_worker._native import OP_PROBE, OP_RANGE, PROBE_BYTES, PROBE_LINES_MAX, probe_lines
from kvstore_service._native import WINDOW_KINDS
from tests.support.gpu_double import gpu_double
from tests.support.rig import CANARY, ERROR, INTERNAL, INVALID_ARGUMENT, OK, FaultyRig, Rig, run

SIZE = 8 << 20


def probe(at: int, lines: int, seed: int = 0, **fields: int) -> np.ndarray:
    return run(0, 0, arg=at, pair_count=lines, generation=seed, **fields)


@pytest.mark.parametrize("kind", sorted({*WINDOW_KINDS, "late"}))
def test_lines_are_where_they_belong_and_nowhere_else(directory, rng, kind):
    with (
        gpu_double(directory) as double,
        FaultyRig(directory, window_kind=kind, window_options={**double.options, "arena_bytes": 8 << 20}) as rig,
    ):
        for at, lines in [(0, 1), (64 * 5, 700), (SIZE - 64 * PROBE_LINES_MAX, PROBE_LINES_MAX), (SIZE - 64, 1)]:
            seed = int(rng.integers(1 << 32))
            rig.window[:] = CANARY
            assert rig.ask(OP_PROBE, 0, probe(at, lines, seed)).tolist() == [[OK, 0]]
            end = at + lines * PROBE_BYTES
            seen = rig.window[at:end].view(np.uint32).reshape(lines, 16)
            assert (seen == probe_lines(seed, at // PROBE_BYTES, lines)).all()
            assert (rig.window[:at] == CANARY).all()
            assert (rig.window[end:] == CANARY).all()


def test_a_line_names_its_seed_and_its_place():
    lines = probe_lines(7, 1000, 2000)
    assert len(np.unique(lines)) == lines.size
    assert not (lines == probe_lines(8, 1000, 2000)).any()
    assert (lines[500:] == probe_lines(7, 1500, 1500)).all()


def test_what_leaves_the_window_is_refused(directory):
    last = 2**64 - 64
    with Rig(directory) as rig:
        rig.window[:] = CANARY
        wrong = [
            probe(32, 1), probe(0, 0), probe(0, PROBE_LINES_MAX + 1), probe(SIZE, 1), probe(SIZE - 64, 2),
            probe(last, 1), probe(last, 2), probe(0, 2**32 - 1), probe(SIZE + 64, 1),
        ]  # fmt: skip
        assert rig.ask(OP_PROBE, 0, np.concatenate(wrong)).tolist() == [[ERROR, INVALID_ARGUMENT]] * len(wrong)
        assert (rig.window == CANARY).all()
        assert rig.ask(OP_PROBE, 99, probe(0, 1, lane=9, slot_epoch=0)).tolist() == [[OK, 0]], (
            "of the others it is none"
        )


def test_a_window_smaller_than_a_line_has_none(directory):
    with Rig(directory, window_bytes=63) as rig:
        assert rig.ask(OP_PROBE, 0, probe(0, 1)).tolist() == [[ERROR, INVALID_ARGUMENT]]


@pytest.mark.parametrize(("kind", "words"), [("gdr", "bar_spoils=70000"), ("staged", "copy_spoils=70000")])
def test_the_daemon_says_that_it_reads_back_something_else(directory, kind, words):
    with gpu_double(directory, f"ordering=0 {words}") as double:
        with Rig(directory, window_kind=kind, window_options=double.options) as rig:
            assert rig.ask(OP_PROBE, 0, probe(0, 1000)).tolist() == [[OK, 0]]
            assert rig.ask(OP_PROBE, 0, probe(64000, 1000)).tolist() == [[ERROR, INTERNAL]]
        assert double.faults() == []


def test_who_probes_without_end_is_fair_to_others(directory, rng):
    """All that a ring takes of the largest runs, again and again, on the thread that serves the other worker."""
    with Rig(directory) as hostile, Rig(directory, beside=hostile, owner=1001) as other:
        pack = other.make_pack(rng)
        epoch = other.bind(0, [pack], 512)
        flood = np.concatenate([probe(0, PROBE_LINES_MAX)] * 64)
        posted = [hostile.post(OP_PROBE, 0, flood) for _ in range(8)]
        for _ in range(20):
            assert other.ask(OP_RANGE, 0, run(0, epoch, pair_count=64)).tolist() == [[OK, 0]]
        assert other.plane.stats()["runs_error"] == 0
        for seq in posted:
            assert (hostile.ring.wait(seq, 20_000_000)[:, 0] == OK).all()
    del hostile, other
