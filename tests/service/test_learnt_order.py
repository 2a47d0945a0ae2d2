"""Orders that are learnt from sampled runs: against a reference that is as slow as it is plain."""

import numpy as np
import pytest

from kvstore_service._native import DISK_COST, through_blocks
from kvstore_service.daemon.disk.cost import OFF
from kvstore_service.daemon.disk.learnt_order import GAIN_MIN, learn, order_of

EARLIER, LATER = 0x00000000FFFFFFFF, 0xFFFFFFFF00000000


def reference_us(words: list[int], per_block: int, cost: tuple[float, float, float]) -> float:
    request_us, kib_us, _ = cost
    through, total = through_blocks(cost), 0.0
    for run in range(64):
        blocks = sorted({record // per_block for record, word in enumerate(words) if word >> run & 1})
        for i, block in enumerate(blocks):
            gap = block - blocks[i - 1] - 1 if i else through + 1
            total += 4 * kib_us * (1 + gap) if gap <= through else request_us + 4 * kib_us
    return total


def samples_of(rng: np.random.Generator, layers: int, lanes: int, tokens: int, hot: float) -> np.ndarray:
    """64 runs want a tenth of the records, of which a part `hot` are the same ones for all runs of a segment."""
    samples = np.zeros((layers, lanes, tokens), np.uint64)
    wanted = tokens // 10
    for segment in np.ndindex(layers, lanes):
        favourites = rng.permutation(tokens)[: int(wanted * hot)]
        for run in range(64):
            records = np.union1d(favourites, rng.permutation(tokens)[: wanted - len(favourites)])
            samples[segment][records] |= np.uint64(1) << np.uint64(run)
    return samples


@pytest.mark.parametrize("record_bytes", [64, 512, 4096])
@pytest.mark.parametrize("cost", [DISK_COST, (80.0, 1.0, 0.0), (1.0, 10.0, 0.0)])
def test_the_expected_times_are_those_of_a_plain_count(rng, record_bytes, cost):
    samples = samples_of(rng, 2, 1, 256, 0.5)
    per_block = 4096 // record_bytes
    learnt = learn(samples, record_bytes, cost)
    before = after = 0.0
    for words in samples.reshape(-1, 256):
        stays = moves = 0.0
        for mine, others in ((EARLIER, LATER), (LATER, EARLIER)):
            order = order_of(words & np.uint64(mine))
            judges = (words & np.uint64(others)).tolist()
            stays += reference_us(judges, per_block, cost)
            moves += reference_us([judges[record] for record in order], per_block, cost)
        before, after = before + stays, after + min(stays, moves)
    records = np.bitwise_count(samples).sum()
    assert learnt.before_us == pytest.approx(1000 * before / records)
    assert learnt.after_us == pytest.approx(1000 * after / records)
    assert learnt.runs == 64


def test_every_order_is_a_permutation_with_the_often_wanted_first(rng):
    samples = samples_of(rng, 2, 3, 512, 0.8)
    learnt = learn(samples, 512, DISK_COST)
    assert (np.sort(learnt.orders, axis=2) == np.arange(512)).all()
    assert learnt.gain > GAIN_MIN
    for segment in np.ndindex(2, 3):
        classes = np.ceil(np.log2(np.bitwise_count(samples[segment])[learnt.orders[segment]] + 1.0))
        assert (np.diff(classes) <= 0).all()
        for one in np.unique(classes):  # as they lay
            assert (np.diff(learnt.orders[segment][classes == one].astype(int)) > 0).all()


def test_a_segment_that_nothing_is_known_of_stays_as_it_is():
    samples = np.zeros((1, 2, 256), np.uint64)
    samples[0, 1, ::16] = 0xFFFF
    learnt = learn(samples, 512, DISK_COST)
    assert (learnt.orders[0, 0] == np.arange(256)).all()
    assert (learnt.orders[0, 1] != np.arange(256)).any()
    assert (learnt.runs, learn(0 * samples, 512, DISK_COST).gain) == (8, 0)


def test_chance_is_not_worth_a_rewrite(rng):
    """Runs that have nothing in common: what one half teaches does not help with the other."""
    assert learn(samples_of(rng, 2, 2, 1024, 0.0), 512, DISK_COST).gain < GAIN_MIN


def test_what_only_one_session_wants_again_and_again_is_not_worth_a_rewrite(rng):
    samples = np.zeros((2, 4, 1024), np.uint64)
    for segment in np.ndindex(2, 4):
        for session in range(4):
            favourites = rng.permutation(1024)[:100]
            for run in range(16 * session, 16 * session + 16):
                samples[segment][rng.permutation(favourites)[:90]] |= np.uint64(1) << np.uint64(run)
    assert learn(samples, 512, DISK_COST).gain < GAIN_MIN


def test_a_disk_whose_requests_cost_nothing_gains_nothing(rng):
    assert learn(samples_of(rng, 1, 1, 256, 0.8), 512, OFF).gain == 0
