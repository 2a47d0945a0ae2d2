"""A worker with thousands of runs under way ends them in small parts: others are served between these."""

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from decode_worker._native import OP_GATHER, OP_RANGE
from kvstore_service._native import BLOCK_BYTES, RingGeometry
from tests.support.rig import NO_PAIRS, OK, WAIT_US, FaultyRig, Rig, run, until

RINGS, WINDOW = 64, 128  # of a worker; runs of a ring that are under way at once
RUNS = RINGS * WINDOW
ATTEMPTS = 20  # on a busy machine any process may be kept from its work for a while
ENDINGS: dict[str, Callable[[Rig], None]] = {
    "unbind": lambda rig: rig.plane.unbind(rig.worker, 0),
    "removal": lambda rig: rig.plane.remove_worker(rig.worker),
    "poison": lambda rig: rig.ring.poison(),
}


def ended(rig: Rig) -> int:
    stats = rig.plane.stats()
    return stats["runs_stale"] + stats["runs_error"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ending", ENDINGS)
def test_runs_of_a_neighbour_end_in_small_parts(tmp_path: Path, ending: str) -> None:
    """One ticket of the victim's would wait for all of them, some milliseconds."""
    rng = np.random.default_rng(1)
    (tmp_path / "beside").mkdir()
    with FaultyRig(tmp_path, owner=1) as victim:
        pack = victim.make_pack(rng, 1, 1)
        wanted, pairs = run(0, victim.bind(0, [pack], 64), pair_count=1), np.array([[5, 0]], np.uint32)

        def ended_meanwhile() -> list[int]:
            """Runs of the neighbour's that ended while one ticket of the victim's was served, for each that met any."""
            with Rig(tmp_path / "beside", beside=victim, owner=2, geometry=RingGeometry(2, WINDOW, 1)) as rig:
                rings = [rig.ring, *(rig.add_ring() for _ in range(RINGS - 1))]
                many = np.repeat(run(0, rig.bind(0, [pack], 64), pair_count=1), WINDOW)
                victim.set_faults(delay_us=60_000_000)
                for ring in rings:
                    ring.post(OP_RANGE, 0, 0, many, NO_PAIRS, WAIT_US)
                until(lambda: victim.plane.census()["runs_in_flight"] == RUNS, 20)
                victim.set_faults()
                seen = [ended(victim)]
                end = threading.Thread(target=ENDINGS[ending], args=(rig,))
                end.start()
                while seen[-1] < seen[0] + RUNS:
                    assert tuple(victim.ask(OP_GATHER, 0, wanted, pairs)[0]) == (OK, 0)
                    seen.append(ended(victim))
                end.join(30)
                if ending == "removal":
                    rig.worker = rig.plane.add_worker(rig.window_fd, 4096, rig.staging_fd, 4096, 1, 2)
                return [part for part in np.diff(seen).tolist() if part > 0]

        assert any(max(ended_meanwhile()) < RUNS / 4 for _ in range(ATTEMPTS))
        assert not victim.ring.poisoned


def test_a_pack_that_fills_the_tier_is_closed_in_small_parts(tmp_path: Path) -> None:
    """Copy threads, which need a lock for every ticket, would wait until all of its frames are given up."""
    layers, tokens, record_bytes = 2, 4096, 4096
    frames = layers * tokens * record_bytes // (4 * BLOCK_BYTES)

    def left_meanwhile() -> list[int]:
        """Frames in use, again and again, while the pack is closed."""
        with Rig(tmp_path, window_bytes=1 << 25, staging_bytes=1 << 25) as rig:
            pack = rig.make_pack(np.random.default_rng(1), layers, 1, record_bytes, tokens)
            epoch = rig.bind(0, [pack], 256, first=0, gap=0)
            for layer, first in itertools.product(range(layers), range(0, tokens, 256)):
                whole = run(0, epoch, first_pair=first, pair_count=256)
                assert tuple(rig.ask(OP_RANGE, layer, whole)[0]) == (OK, 0)
            rig.plane.unbind(rig.worker, 0)
            left = [rig.plane.stats()["frames_used"]]
            assert left[0] == frames
            close = threading.Thread(target=rig.plane.close_pack, args=(pack.handle,))
            close.start()
            while left[-1] > 0:
                left.append(rig.plane.stats()["frames_used"])
            close.join(30)
            pack.path.unlink()
            return left

    assert any(max(-np.diff(left_meanwhile())) < frames / 2 for _ in range(ATTEMPTS))
