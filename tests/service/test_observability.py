"""What the daemon says of itself, against what was really done: metrics, descriptions, logs."""

import json
import logging
import sys
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest

from kvstore_service.client import AdminClient, StoreClient, StoreError
from kvstore_service.daemon import logs
from kvstore_service.daemon.front.metrics import COUNTERS, GAUGES
from tests.daemon_process import Daemon
from tests.service import world
from tests.service.world import TestWorker

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
    assert served == {name for name in scrape(daemon) if not name.endswith("_created")}


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
    assert answered == ["RegisterWorker", "OpenSession", "CloseSession"]
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
