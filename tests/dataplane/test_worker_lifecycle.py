"""Unbind, removal, poison and close: when they return, nothing of the old can be stored any more."""

import threading
import time

import numpy as np
import pytest

from decode_worker._native import OP_RANGE, OP_STORE, RingPoisoned, RingProducer, RingTimeout
from kvstore_service._native import DataPlane, NativeError
from tests.support.rig import CANARY, ERROR, OK, STALE, FaultyRig, Rig, all_records, memfd, run, spec, until


def unchanged_for(window, seconds):
    before = window.copy()
    time.sleep(seconds)
    return bool((window == before).all())


def post_all(rig, epoch, places, lanes=2):
    runs = np.concatenate([run(0, epoch, lane=lane, pair_count=places) for lane in range(lanes)])
    return [rig.post(OP_RANGE, layer, runs) for layer in (0, 1)]


@pytest.mark.parametrize("round_", range(5))
def test_unbind_while_copies_are_delayed(directory, rng, seed, round_):
    with FaultyRig(directory, dram_bytes=1 << 20, copy_threads=2) as rig:
        pack = rig.make_pack(rng)
        for attempt in range(10):
            epoch = rig.bind(0, [pack], 512)
            rig.set_faults(delay_us=4000, delay_random=True, reorder=True, seed=seed + attempt)
            tickets = post_all(rig, epoch, 512)
            time.sleep(float(rng.random()) * 0.004)
            rig.plane.unbind(rig.worker, 0)
            rig.window[:] = CANARY
            time.sleep(0.006)
            assert (rig.window == CANARY).all(), "a copy landed after unbind had returned"
            for ticket in tickets:
                assert set(rig.ring.wait(ticket, 5_000_000)[:, 0]) <= {OK, STALE}
        assert rig.plane.stats()["bound_slots"] == 0
        rig.plane.close_pack(pack.handle)


def test_unbind_while_reads_are_in_flight(directory, rng):
    with Rig(directory, dram_bytes=1 << 20, window_bytes=32 << 20) as rig:
        pack = rig.make_pack(rng, tokens=4096)
        for _ in range(30):
            epoch = rig.bind(0, [pack], 4096)
            tickets = post_all(rig, epoch, 4096)
            time.sleep(float(rng.random()) * 0.003)
            rig.plane.unbind(rig.worker, 0)
            lane = rig.window[: 64 << 10]
            lane[:] = CANARY
            assert unchanged_for(lane, 0.002)
            for ticket in tickets:
                assert set(rig.ring.wait(ticket, 5_000_000)[:, 0]) <= {OK, STALE}
        rig.plane.close_pack(pack.handle)  # its frames were not left pinned
        assert rig.plane.stats()["frames_used"] == 0


def test_unbind_of_one_slot_leaves_the_other(directory, rng):
    with FaultyRig(directory, window_bytes=16 << 20) as rig:
        pack = rig.make_pack(rng)
        first = rig.bind(0, [pack], 512)
        other = rig.bind(1, [pack], 512, first=8 << 20)
        rig.set_faults(delay_us=20_000)
        ticket = rig.post(
            OP_RANGE,
            0,
            np.concatenate([run(0, first, pair_count=512), run(1, other, pair_count=512)]),
        )
        until(lambda: rig.plane.stats()["tickets"] >= 5)
        rig.plane.unbind(rig.worker, 0)
        assert rig.ring.wait(ticket, 5_000_000)[:, 0].tolist() == [STALE, OK]
        assert (rig.lane(0, 0, 512) == pack.records[0, 0]).all()
        assert (rig.window[: 8 << 20] == CANARY).all()


def test_remove_worker_with_everything_in_flight(directory, rng):
    with Rig(directory, dram_bytes=1 << 20, window_bytes=16 << 20) as rig:
        pack = rig.make_pack(rng, tokens=1024)
        epoch = rig.bind(0, [pack], 1024)
        upload = rig.plane.create_upload(str(directory / "open"), spec(rng, 2, 2, 512, 1024))
        rig.plane.own_upload(rig.worker, upload)
        post_all(rig, epoch, 1024)
        rig.staging[:] = 5
        rig.staging[1024 * 512 : 1024 * 514] = np.arange(1024, dtype=np.uint16).view(np.uint8)
        rig.post(OP_STORE, 0, run(upload, 0, lane=0))
        rig.plane.remove_worker(rig.worker)
        rig.window[:] = CANARY
        assert unchanged_for(rig.window, 0.05)
        assert rig.ring.poisoned
        assert not (directory / "open").exists()
        stats = rig.plane.stats()
        assert (stats["workers"], stats["rings"], stats["bound_slots"], stats["uploads_open"]) == (
            0,
            0,
            0,
            0,
        )
        with pytest.raises(NativeError) as error:
            rig.plane.unbind(rig.worker, 0)
        assert error.value.code == "NOT_FOUND"
        rig.plane.close_pack(pack.handle)


def test_removal_while_stopped(directory, rng):
    with FaultyRig(directory) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        rig.set_faults(stopped=True)
        post_all(rig, epoch, 512)
        rig.plane.remove_worker(rig.worker)
        rig.set_faults()
        assert unchanged_for(rig.window, 0.05)


def test_poison_by_the_worker_stops_late_stores(directory, rng):
    with FaultyRig(directory) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        rig.set_faults(stopped=True)
        tickets = post_all(rig, epoch, 512)
        with pytest.raises(RingTimeout):
            rig.ring.wait(tickets[0], 20_000)
        assert rig.ring.poisoned
        rig.set_faults()  # the daemon wakes up late
        assert unchanged_for(rig.window, 0.05)
        assert (rig.window == CANARY).all()
        for call in (
            lambda: rig.ring.wait(tickets[1], 1000),
            lambda: rig.ring.poll(tickets[1]),
            lambda: rig.post(OP_RANGE, 0, run(0, epoch)),
        ):
            with pytest.raises(RingPoisoned):
                call()


def test_poison_with_delayed_runs(directory, rng):
    with FaultyRig(directory) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        rig.set_faults(delay_us=50_000)
        post_all(rig, epoch, 512)
        until(lambda: rig.plane.stats()["tickets"] >= 6)
        rig.ring.poison()
        assert unchanged_for(rig.window, 0.12)
        assert (rig.window == CANARY).all()


def test_a_worker_registers_anew_after_poison(directory, rng):
    with Rig(directory) as rig:
        pack = rig.make_pack(rng)
        rig.ring.poison()
        rig.plane.remove_worker(rig.worker)
        rig.worker = rig.plane.add_worker(
            rig.window_fd, rig.window_bytes, rig.staging_fd, rig.staging_bytes, rig.slots, rig.owner
        )
        rig.ring = rig.add_ring()
        epoch = rig.bind(0, [pack], 512)
        assert rig.ask(OP_RANGE, 0, run(0, epoch, pair_count=512)).tolist() == [[OK, 0]]
        assert (rig.lane(0, 0, 512) == pack.records[0, 0]).all()


def test_close_wakes_a_waiting_worker(directory, rng):
    with FaultyRig(directory) as rig:
        pack = rig.make_pack(rng)
        epoch = rig.bind(0, [pack], 512)
        rig.set_faults(delay_us=60_000_000)
        ticket = rig.post(OP_RANGE, 0, run(0, epoch, pair_count=512))
        closer = threading.Timer(0.05, rig.plane.close)
        closer.start()
        start = time.monotonic()
        try:
            result = rig.ring.wait(ticket, 10_000_000)
            assert result[0, 0] not in (OK, ERROR, STALE)
        except RingPoisoned:
            pass
        assert time.monotonic() - start < 5
        closer.join()
        rig.plane.close()
        for call in (
            lambda: rig.plane.open_pack(str(pack.path)),
            lambda: rig.plane.add_worker(rig.window_fd, 4096, rig.staging_fd, 4096, 1, rig.owner),
        ):
            with pytest.raises(rig.native.NativeError) as error:
                call()
            assert error.value.code == "UNAVAILABLE"


def test_close_keeps_files_of_open_uploads(directory, rng):
    with Rig(directory) as rig:
        upload = rig.plane.create_upload(str(directory / "p"), spec(rng, 1, 1, 512, 256))
        rig.plane.own_upload(rig.worker, upload)
    assert (directory / "p").exists()


def test_planes_come_and_go(directory):
    for _ in range(10):
        DataPlane(1 << 20, 8, 2).close()
    DataPlane(1 << 20, 8, 1)  # the destructor ends it
    for arguments in [
        (0, 8, 1),
        (1 << 20, 0, 1),
        (1 << 20, 8, 0),
        (1 << 20, 8, 1, 30, 17),
        (1 << 20, 5000, 1),
    ]:
        with pytest.raises(NativeError) as error:
            DataPlane(*arguments)
        assert error.value.code == "INVALID_ARGUMENT"


def test_many_workers_on_two_threads(directory, rng):
    with Rig(directory, dram_bytes=1 << 20, copy_threads=2) as rig:
        pack = rig.make_pack(rng, layers=1, lanes=1)
        failures = []

        def worker(number):
            generator = np.random.default_rng(number)
            window, staging = memfd("w", 1 << 20), memfd("s", 4096)
            me = rig.plane.add_worker(window, 1 << 20, staging, 4096, 1, owner=number % 3)
            g = rig.geometry
            fds = memfd("r", g.requests_bytes), memfd("c", g.completions_bytes)
            rig.plane.add_ring(me, *fds, g)
            rig.plane.serve_rings(me)
            ring = RingProducer(*fds)
            import mmap

            view = np.frombuffer(mmap.mmap(window, 1 << 20), np.uint8)
            for _ in range(20):
                epoch = rig.plane.bind(me, 0, [pack.handle], np.array([[[512, 512]]], np.uint64), 512)
                first, count = int(generator.integers(0, 256)), int(generator.integers(1, 256))
                ticket = ring.post(
                    OP_RANGE,
                    0,
                    0,
                    run(0, epoch, first_pair=first, pair_count=count),
                    np.zeros((0, 2), np.uint32),
                )
                result = ring.wait(ticket, 10_000_000)
                got = view[512 : 512 + count * 512].reshape(count, 512)
                if result[0, 0] != OK or not (got == pack.records[0, 0, first : first + count]).all():
                    failures.append((number, result))
                rig.plane.unbind(me, 0)
            rig.plane.remove_worker(me)

        threads = [threading.Thread(target=worker, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        assert rig.plane.stats()["workers"] == 1
        assert all_records([pack], 0, 0).shape == (512, 512)
