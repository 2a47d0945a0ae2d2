"""What the daemon says of itself, against what was really done: metrics, descriptions, logs."""

import contextlib
import json
import logging
import os
import socket
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import grpc
import numpy as np
import psutil
import pytest

from kvstore_service import __version__
from kvstore_service.client import AdminClient, StoreClient, StoreError
from kvstore_service.daemon import logs
from kvstore_service.daemon.front.metrics import (
    COUNTERS,
    GAUGES,
    LIMITS,
    PER_USER,
    USERS_SHOWN_MAX,
    Measures,
    StoreCollector,
)
from kvstore_service.daemon.front.metrics_server import CONNECTIONS_MAX
from tests.support import world
from tests.support.daemon_process import Daemon
from tests.support.world import TestWorker

NUMBERS = [1, 2, 3]
BLOCK_BYTES = 4096


def scrape(daemon: Daemon) -> dict[str, float]:
    with urlopen(f"http://{daemon.ready['metrics']}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if line and line[0] != "#")}


def disk_reads(pid: int) -> int:
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["read_bytes"])


def test_metrics_and_descriptions_agree_with_what_was_done(daemon: Daemon, client: StoreClient) -> None:
    worker = TestWorker(client)
    session = client.open_session(world.LAYOUT, 4096)
    reserved = client.reserve_pack(session, [world.reservation(n, i) for i, n in enumerate(NUMBERS)])
    uploads = [pack.upload_id for pack in reserved if pack.upload_id is not None]
    for upload, number in zip(uploads, NUMBERS, strict=True):
        worker.store(upload, number)
    refs = [item.pack for item in client.commit_pack(session, uploads) if item.pack is not None]
    assert client.lookup_prefix(world.LAYOUT.fingerprint, [world.candidate(9)]) == []
    found = client.lookup_prefix(world.LAYOUT.fingerprint, [world.candidate(n, i) for i, n in enumerate(NUMBERS)])
    assert client.attach_packs(session, found) == len(NUMBERS) * world.TOKENS
    epoch = client.bind_slot(session, 1, refs, worker.windows(1))

    before = scrape(daemon)
    disk_before = disk_reads(daemon.pid)
    records = np.arange(0, 3 * world.TOKENS, 7, dtype=np.uint32)
    for _ in range(2):  # the second time from DRAM
        assert (worker.gather(1, epoch, records) == world.expected(NUMBERS, records)).all()
    after = scrape(daemon)
    rose = {name: after[name] - before.get(name, 0.0) for name in after}

    runs = 2 * world.LAYERS * world.LANES
    copied = runs * len(records)
    assert rose["kvstore_tickets_total"] == 2 * world.LAYERS
    assert rose["kvstore_runs_total"] == rose["kvstore_runs_ok_total"] == runs
    assert rose["kvstore_records_copied_total"] == copied
    assert rose["kvstore_bytes_copied_total"] == copied * world.RECORD_BYTES
    assert rose["kvstore_nvme_read_bytes_total"] == disk_reads(daemon.pid) - disk_before > 0
    assert rose["kvstore_extent_misses_total"] == rose["kvstore_extent_hits_total"] == after["kvstore_frames_used"] > 0

    files = list((daemon.data_dir / "packs").iterdir())
    sizes = sum(path.stat().st_size for path in files)
    payload = len(NUMBERS) * world.LAYERS * world.LANES * world.TOKENS * world.RECORD_BYTES
    expected = {
        "kvstore_packs": len(files),
        "kvstore_pack_bytes": sizes,
        "kvstore_stored_bytes": sizes,
        "kvstore_nvme_write_bytes_total": sizes,
        "kvstore_store_bytes_total": payload,
        "kvstore_commits_total": len(NUMBERS),
        "kvstore_lookups_total": 2,
        "kvstore_lookup_hits_total": 1,
        "kvstore_lookup_misses_total": 1,
        "kvstore_lookup_tokens_found_total": len(NUMBERS) * world.TOKENS,
        "kvstore_workers": 1,
        "kvstore_rings": 2,
        "kvstore_sessions": 1,
        "kvstore_bound_slots": 1,
        "kvstore_uploads_open": 0,
        "kvstore_uploads_reserved": 0,
        "kvstore_packs_damaged": 0,
        "kvstore_crc_errors_total": 0,
        "kvstore_runs_error_total": 0,
    }
    assert {name: after.get(name, 0.0) for name in expected} == expected

    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        described = admin.describe_session(session)
        summary = described.session
        assert (summary.tokens, summary.packs, summary.bytes) == (len(NUMBERS) * world.TOKENS, len(files), sizes)
        assert (list(summary.slots), described.declared_max_tokens) == ([1], 4096)
        shown = {pack.pack_id: (pack.build, pack.first_token, pack.tokens, pack.references) for pack in described.packs}
        assert shown == {ref.pack_id: (ref.build, ref.first_token, ref.tokens, 1) for ref in refs}
        assert [check.detail for check in admin.audit() if not check.ok] == []
    worker.close()


def test_every_counter_has_a_meaning_and_is_served(daemon: Daemon) -> None:
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        assert set(admin.get_status().counters) == GAUGES.keys() | COUNTERS.keys()
    served = {f"kvstore_{name}" for name in GAUGES} | {f"kvstore_{name}_total" for name in COUNTERS}
    served |= {f"kvstore_limit_{name}" for name in LIMITS}
    plain = {name for name in scrape(daemon) if name.startswith("kvstore_") and "{" not in name}
    assert served == plain


def test_calls_users_limits_and_the_process_are_measured(daemon: Daemon, client: StoreClient) -> None:
    client.open_session(world.LAYOUT, 1024)
    before = scrape(daemon)
    for _ in range(3):
        client.lookup_prefix(world.LAYOUT.fingerprint, [world.candidate(1)])
    after = scrape(daemon)

    def rose(name: str) -> float:
        return after[name] - before[name]

    assert rose('kvstore_call_seconds_count{class="lookup"}') == 3
    assert rose('kvstore_call_seconds_bucket{class="lookup",le="+Inf"}') == 3
    assert 0 < rose('kvstore_call_seconds_sum{class="lookup"}') < 3 * 10.0
    assert rose('kvstore_call_seconds_count{class="commit"}') == 0
    uid = os.getuid()
    assert after[f'kvstore_user_sessions{{uid="{uid}"}}'] == after["kvstore_sessions"] == 1
    assert after[f'kvstore_user_workers{{uid="{uid}"}}'] == 1
    assert after["kvstore_limit_nvme_bytes"] == 1 << 30
    assert after[f'kvstore_build_info{{version="{__version__}"}}'] == 1
    assert after["process_resident_memory_bytes"] > 1 << 20
    assert after["process_open_fds"] > 3


def test_users_beyond_the_first_are_summed() -> None:
    users = {uid: dict.fromkeys(PER_USER, 1) for uid in range(USERS_SHOWN_MAX + 5)}
    zeros = dict.fromkeys((*GAUGES, *COUNTERS, *LIMITS), 0)
    measures = Measures(lambda: zeros, zeros, lambda: users, dict, dict, "0")
    (family,) = [found for found in StoreCollector(measures).collect() if found.name == "kvstore_user_sessions"]
    assert len(family.samples) == USERS_SHOWN_MAX + 1
    assert (family.samples[-1].labels, family.samples[-1].value) == ({"uid": "other"}, 5)


def test_silent_connections_neither_hold_threads_nor_stop_a_scrape(daemon: Daemon) -> None:
    host, port = daemon.ready["metrics"].split(":")
    threads = psutil.Process(daemon.pid).num_threads()
    with contextlib.ExitStack() as stack:
        for _ in range(10 * CONNECTIONS_MAX):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
        assert scrape(daemon)["kvstore_draining"] == 0
        assert psutil.Process(daemon.pid).num_threads() <= threads + 1
        assert daemon.open_descriptors() < CONNECTIONS_MAX + 200
    for request in (b"POST /metrics HTTP/1.1\r\n\r\n", b"GET /else HTTP/1.1\r\n\r\n", b"x" * 100_000):
        with (
            socket.create_connection((host, int(port)), timeout=10) as peer,
            contextlib.suppress(ConnectionError),
        ):
            peer.sendall(request)
            assert peer.recv(4096)[:12] in (b"HTTP/1.1 405", b"HTTP/1.1 404", b"")


def test_json_logs_have_a_line_per_call_with_its_request_id(tmp_path: Path) -> None:
    options = ("--nvme-bytes=1GiB", "--log-format=json", "--log-level=debug")
    with Daemon(tmp_path, options=options) as daemon:
        with StoreClient.connect(daemon.socket, daemon.broker, name="a worker\nwith lines") as client:
            worker = TestWorker(client)
            session = client.open_session(world.LAYOUT, 4096)
            with pytest.raises(StoreError) as refused:
                client.close_session("nonsense")
            client.close_session(session)
            worker.close()
        daemon.stop()
        lines = [json.loads(line) for line in daemon.log_path.read_text().splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    (failure,) = [line for line in lines if line["message"] == "refused"]
    assert (failure["request"], failure["code"]) == (refused.value.request_id, "NOT_FOUND")
    answered = [line["method"].rpartition("/")[2] for line in lines if line["message"] == "answered"]
    assert answered == ["RegisterWorker", "ServeRings", "OpenSession", "CloseSession"]
    (registered,) = [line for line in lines if line["message"] == "worker registered"]
    (call,) = [line for line in lines if line.get("method", "").endswith("RegisterWorker")]
    assert registered["name"] == "a?worker?with?lines"
    assert registered["request"] == call["request"]


def test_text_logs_are_one_line_whatever_a_name_holds(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("test-of-logs")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logs.TextFormatter())
    log.addHandler(handler)
    try:
        logs.event(log, logging.WARNING, "worker registered", name="x\nERROR fake", pid=7, share=0.25, empty="")
    finally:
        log.removeHandler(handler)
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert line.endswith('WARNING test-of-logs worker registered name="x\\nERROR fake" pid=7 share=0.2 empty=""\n')


def test_what_anybody_can_cause_again_and_again_is_logged_sparsely(caplog: pytest.LogCaptureFixture) -> None:
    sparse = logs.Sparse(logging.getLogger("test-of-logs"), period_s=2.0)
    with caplog.at_level(logging.INFO, "test-of-logs"):
        for number in range(100):
            sparse.event("a", logging.INFO, "refused", number=number)
        sparse.event("b", logging.INFO, "refused", number=-1)
        sparse.event("b", logging.DEBUG, "not even looked at")
        seen = [vars(record)["fields"] for record in caplog.records]
        assert [fields["number"] for fields in seen] == [*range(logs.SPARSE_LINES), -1]
        deadline = time.monotonic() + 10.0
        while len(caplog.records) == len(seen):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (rest,) = [vars(record)["fields"] for record in caplog.records[len(seen) :]]
        assert rest == {"number": 99, "unlogged": 100 - logs.SPARSE_LINES}
        sparse.event("a", logging.INFO, "refused", number=100)  # a new period
        assert vars(caplog.records[-1])["fields"] == {"number": 100}
        for number in range(2 * logs.SPARSE_KEYS):
            sparse.event(number, logging.INFO, "refused")
        assert len(caplog.records) <= len(seen) + 2 + logs.SPARSE_KEYS + logs.SPARSE_LINES


def test_refused_calls_do_not_fill_the_log(daemon: Daemon) -> None:
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        status = channel.unary_unary("/kvstore.v1.AdminService/GetStatus")
        for _ in range(10 * logs.SPARSE_LINES):
            with pytest.raises(grpc.RpcError, match="kvstore-token"):
                status(b"", timeout=10.0)
    lines = daemon.log_path.read_text().count("method=/kvstore.v1.AdminService/GetStatus")
    assert 0 < lines <= 3 * (logs.SPARSE_LINES + 1)  # in three periods
