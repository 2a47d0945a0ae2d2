"""What an operator does: pin, evict, audit, drain, and kvctl over all of it."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import grpc
import numpy as np
import pytest

from kvstore_service import kvctl
from kvstore_service._proto import admin_service_pb2 as admin_pb
from kvstore_service.client import AdminClient, SidecarKey, StoreClient, StoreError
from kvstore_service.client.call import local_channel
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.daemon.store.eviction import BATCH
from kvstore_service.kvctl import commands
from kvstore_service.kvctl.output import Output
from kvstore_service.shared.types import NO_PARENT, PACK_ID_BYTES, PackRef, PackRow
from tests.support import world
from tests.support.daemon_process import Daemon
from tests.support.world import TestWorker

ROOT = Path(__file__).parents[2]
CHAIN = 100 * BATCH


def chain(worker: TestWorker, session: str, numbers: list[int]) -> list[world.PackRef]:
    """Commits packs that continue each other and attaches them."""
    reserved = worker.client.reserve_pack(session, [world.reservation(n, i) for i, n in enumerate(numbers)])
    for pack, number in zip(reserved, numbers, strict=True):
        assert pack.upload_id is not None
        worker.store(pack.upload_id, number)
    committed = worker.client.commit_pack(session, [pack.upload_id for pack in reserved if pack.upload_id is not None])
    refs = [item.pack for item in committed if item.pack is not None]
    worker.client.attach_packs(session, refs)
    return refs


def run(daemon: Daemon, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "kvstore_service.kvctl", "--socket", daemon.socket, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)


def test_what_is_in_use_pinned_or_continued_stays(worker: TestWorker, admin: AdminClient, daemon: Daemon) -> None:
    client = worker.client
    session = client.open_session(world.LAYOUT, 4096)
    first, second = chain(worker, session, [1, 2])
    client.put_sidecar(SidecarKey(second.pack_id, second.build, "hash"), b"index" * 1000)
    ids = [first.pack_id, second.pack_id]

    def refusals(descendants: bool = False) -> list[str]:
        return [item.message for item in admin.evict(ids[:1], descendants) if item.code]

    assert "attached to 1 sessions" in refusals()[0]
    client.close_session(session)
    assert "continued by 1 packs" in refusals()[0]
    admin.pin(ids[1:])
    daemon.restart()  # pins are durable
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        assert [item.pinned for item in admin.list_packs() if item.pack_id == ids[1]] == [True]
        answers = {item.pack_id: item.message for item in admin.evict(ids[:1], descendants=True)}
        assert "pinned" in answers[ids[1]]
        assert "continued" in answers[ids[0]]
        assert all(check.ok for check in admin.audit())
        admin.unpin(ids[1:])
        stored = admin.get_status().counters["stored_bytes"]
        gone = admin.evict(ids[:1], descendants=True)
        assert [item.code for item in gone] == [0, 0]
        assert sum(item.freed_bytes for item in gone) == stored
        assert list(admin.list_packs()) == []
        assert admin.get_status().counters["stored_bytes"] == 0
        assert [path for path in daemon.data_dir.rglob("*") if path.suffix in (".pack", ".sidecar")] == []
        assert all(check.ok for check in admin.audit())
        (unknown,) = admin.evict(ids[:1])
        assert unknown.code == grpc.StatusCode.NOT_FOUND.value[0]
        with pytest.raises(StoreError, match="NOT_FOUND"):
            admin.pin(ids[:1])


def test_an_evicted_pack_can_be_written_again(worker: TestWorker, admin: AdminClient) -> None:
    client = worker.client
    session = client.open_session(world.LAYOUT, 4096)
    (old,) = chain(worker, session, [1])
    epoch = client.bind_slot(session, 0, [old], worker.windows(0))
    records = np.arange(world.TOKENS, dtype=np.uint32)
    assert (worker.gather(0, epoch, records) == world.expected([1], records)).all()
    client.close_session(session)
    assert [item.code for item in admin.evict([old.pack_id])] == [0]
    assert client.lookup_prefix(world.LAYOUT.fingerprint, [world.candidate(1)]) == []
    with pytest.raises(StoreError, match="NOT_FOUND"):
        client.get_map(old)

    session = client.open_session(world.LAYOUT, 4096)
    with pytest.raises(StoreError, match="NOT_FOUND"):
        client.attach_packs(session, [old])
    (new,) = chain(worker, session, [1])
    assert new.pack_id == old.pack_id
    assert new.build != old.build
    epoch = client.bind_slot(session, 1, [new], worker.windows(1))
    assert (worker.gather(1, epoch, records) == world.expected([1], records)).all()
    assert all(check.ok for check in admin.audit())


def test_a_pack_whose_parent_was_evicted_meanwhile_is_not_committed(worker: TestWorker, admin: AdminClient) -> None:
    client = worker.client
    session = client.open_session(world.LAYOUT, 4096)
    (parent,) = chain(worker, session, [1])
    (reserved,) = client.reserve_pack(session, [world.reservation(2, 1, parent.pack_id)])
    assert reserved.upload_id is not None
    worker.store(reserved.upload_id, 2)
    other = client.open_session(world.LAYOUT, 4096)
    client.close_session(session)
    assert [item.code for item in admin.evict([parent.pack_id])] == [0]
    (refused,) = client.commit_pack(other, [reserved.upload_id])
    assert refused.error is not None
    assert (refused.error.code, "is not stored" in refused.error.message) == ("FAILED_PRECONDITION", True)
    client.abort_pack([reserved.upload_id])
    assert all(check.ok for check in admin.audit())


def test_eviction_beside_sessions_never_takes_what_they_read(daemon: Daemon, admin: AdminClient) -> None:
    """One thread evicts all that it can, the others write, attach, bind and read the same three packs."""
    records = np.arange(world.TOKENS, dtype=np.uint32)
    ends_s = time.monotonic() + 4.0
    read: list[int] = []

    def serve() -> None:
        with StoreClient.connect(daemon.socket, daemon.broker) as client:
            worker = TestWorker(client)
            for turn in range(10**6):
                if time.monotonic() > ends_s:
                    break
                session = client.open_session(world.LAYOUT, 4096)
                number = 1 + turn % 3
                reserved = worker.write(session, number)
                if reserved.upload_id is not None:
                    client.commit_pack(session, [reserved.upload_id])
                found = client.lookup_prefix(world.LAYOUT.fingerprint, [world.candidate(number)])
                try:
                    client.attach_packs(session, found)
                except StoreError as error:
                    if error.code not in ("NOT_FOUND", "FAILED_PRECONDITION"):  # evicted, or another build
                        raise
                    found = []
                if found:
                    epoch = client.bind_slot(session, 0, found, worker.windows(0))
                    assert (worker.gather(0, epoch, records) == world.expected([number], records)).all()
                    read.append(number)
                client.close_session(session)
            worker.close()

    evicted = 0
    with ThreadPoolExecutor(2) as pool:
        serving = [pool.submit(serve) for _ in range(2)]
        while time.monotonic() < ends_s:
            answers = admin.evict([pack.pack_id for pack in admin.list_packs()])
            evicted += sum(not item.code for item in answers)
        for done in serving:
            done.result(timeout=30)
    assert read
    assert evicted > 3
    assert [check for check in admin.audit() if not check.ok] == []
    assert admin.get_status().counters["packs_damaged"] == 0


@pytest.fixture
def long_chain(tmp_path: Path) -> Iterator[tuple[Daemon, bytes]]:
    """A daemon over a chain of CHAIN packs without content, and the id of the first."""
    daemon = Daemon(tmp_path)
    daemon.data_dir.mkdir(mode=0o700)
    with closing(Catalog(daemon.data_dir)) as catalog:
        names = [number.to_bytes(PACK_ID_BYTES) for number in range(1, CHAIN + 1)]
        refs = [PackRef(name, b"b" * 16, 256 * number, 256) for number, name in enumerate(names)]
        parents = [NO_PARENT, *names]
        rows = [
            PackRow(ref, parent, world.LAYOUT, f"uid-{os.getuid()}", 4096)
            for ref, parent in zip(refs, parents, strict=False)
        ]
        for row in rows:
            (catalog.packs_dir / row.file).touch()
        catalog.commit_packs(rows)
    with daemon:
        yield daemon, names[0]


def test_an_eviction_ends_with_its_caller(long_chain: tuple[Daemon, bytes]) -> None:
    """It goes in steps, an answer each; after a step that nobody waits for no other begins."""
    daemon, first = long_chain
    with AdminClient.connect(daemon.socket, daemon.broker) as admin:
        answers = admin.evicting([first], descendants=True)
        answer = next(answers)
        assert 0 < len(answer.packs) == answer.done <= BATCH
        assert answer.total == CHAIN
        assert not any(pack.code for pack in answer.packs)
        answers.close()
        left = [CHAIN, admin.get_status().packs]
        while left[-1] != left[-2]:
            time.sleep(0.5)
            left.append(admin.get_status().packs)
        assert left[-1] > 0
        with pytest.raises(StoreError, match="DEADLINE_EXCEEDED"):
            list(admin.evicting([first], descendants=True, timeout_s=0.001))
        assert admin.get_status().packs > 0
        gone = admin.evict([first], descendants=True)
        assert [pack.code for pack in gone] == [0] * len(gone)
        assert (gone[-1].pack_id, admin.get_status().packs) == (first, 0)
        assert all(check.ok for check in admin.audit())
        assert not list((daemon.data_dir / "packs").iterdir())


def test_a_dry_run_shows_the_descendants_that_would_go_too(daemon: Daemon, worker: TestWorker) -> None:
    refs = chain(worker, worker.client.open_session(world.LAYOUT, 4096), [1, 2, 3])
    names = [ref.pack_id.hex()[:16] for ref in refs]
    for flags, shown in ((("--dry-run",), names[1:2]), (("--dry-run", "--descendants"), names[1:])):
        out = run(daemon, "evict", *flags, refs[1].pack_id.hex()).stdout
        assert {line.split()[0] for line in out.splitlines() if line.split()[:1] and line.split()[0] in names} == set(
            shown
        )


def test_an_eviction_that_is_cut_short_says_what_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    gone = admin_pb.EvictedPack(pack_id=b"p" * 32, freed_bytes=100)

    def evicting(pack_ids: Sequence[bytes], descendants: bool) -> Iterator[admin_pb.EvictResponse]:
        yield admin_pb.EvictResponse(packs=[gone], done=1, total=2)
        raise StoreError("DEADLINE_EXCEEDED", "the call's deadline has passed")

    client = MagicMock()
    client.packs_named.return_value = [admin_pb.PackSummary(pack_id=b"p" * 32)]
    client.evicting = evicting
    arguments = argparse.Namespace(packs=[], unused=False, dry_run=False, descendants=True)
    with pytest.raises(StoreError, match="DEADLINE_EXCEEDED"):
        commands.evict(client, Output(as_json=True), arguments)
    assert json.loads(capsys.readouterr().out) == {"evicted": 1, "freed_bytes": 100, "stayed": [], "ended": False}


def test_eviction_makes_room(tmp_path: Path) -> None:
    with (
        Daemon(tmp_path, options=("--nvme-bytes=1MiB", "--on-full=refuse")) as daemon,
        StoreClient.connect(daemon.socket, daemon.broker) as client,
        AdminClient.connect(daemon.socket, daemon.broker) as admin,
    ):
        worker = TestWorker(client)
        session = client.open_session(world.LAYOUT, 4096)
        numbers = iter(range(1, 100))
        with pytest.raises(StoreError, match="RESOURCE_EXHAUSTED"):
            deque((worker.commit(session, number) for number in numbers), maxlen=0)
        assert run(daemon, "evict", "--unused", "--older-than=1h").returncode == 0
        assert len(list(admin.list_packs())) > 1
        assert run(daemon, "evict", "--unused").returncode == 0
        assert list(admin.list_packs()) == []
        worker.commit(session, next(numbers))
        worker.close()


def test_audit_sees_a_strange_file_and_a_missing_one(worker: TestWorker, admin: AdminClient, daemon: Daemon) -> None:
    session = worker.client.open_session(world.LAYOUT, 4096)
    chain(worker, session, [1])
    assert run(daemon, "audit").returncode == 0
    strange = daemon.data_dir / "packs" / "strange.pack"
    strange.write_bytes(b"x")
    (pack,) = [path for path in (daemon.data_dir / "packs").iterdir() if path != strange]
    moved = pack.rename(pack.with_suffix(".away"))
    failed = {check.name: check.detail for check in admin.audit() if not check.ok}
    assert "strange.pack" in failed["files = rows + uploads"]
    assert pack.name in failed["catalogue rows = files"]
    moved.rename(pack)
    strange.unlink()
    assert [check.name for check in admin.audit() if not check.ok] == []


def test_kvctl_pins_evicts_and_verifies(worker: TestWorker, daemon: Daemon) -> None:
    session = worker.client.open_session(world.LAYOUT, 4096)
    first, second = chain(worker, session, [1, 2])
    worker.client.close_session(session)
    short = second.pack_id.hex()[:12]
    assert "1 packs pinned" in run(daemon, "pin", short).stdout
    listed = {item["pack_id"]: item["pinned"] for item in json.loads(run(daemon, "packs", "--format", "json").stdout)}
    assert listed == {first.pack_id.hex(): False, second.pack_id.hex(): True}
    stays = run(daemon, "evict", short)
    assert (stays.returncode, "is pinned; unpin it first" in " ".join(stays.stdout.split())) == (1, True)
    assert json.loads(run(daemon, "unpin", short, "--format=json").stdout) == {"unpinned": [second.pack_id.hex()]}
    assert short in run(daemon, "evict", "--unused", "--dry-run").stdout
    assert json.loads(run(daemon, "--format=json", "verify").stdout)["packs"] == 2
    evicted = json.loads(run(daemon, "evict", "--unused", "--format=json").stdout)
    assert (evicted["evicted"], evicted["stayed"]) == (2, [])
    for strange in (["pin", "zz"], ["verify", "00ff"], ["evict", "00ff"]):
        missing = run(daemon, *strange)
        assert missing.returncode == 1
        assert missing.stderr.startswith("kvctl: no packs begin with")
        assert missing.stderr.count("\n") == 1


def test_kvctl_drains_and_waits(daemon: Daemon, client: StoreClient) -> None:
    session = client.open_session(world.LAYOUT, 4096)
    assert run(daemon, "drain", "--wait", "0.3").returncode == 1
    client.close_session(session)
    drained = run(daemon, "drain", "--wait", "10", "--format=json")
    assert (drained.returncode, json.loads(drained.stdout)) == (0, {"state": "draining", "sessions": 0})
    with pytest.raises(StoreError, match="UNAVAILABLE"):
        client.open_session(world.LAYOUT, 4096)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["evict"], "needs packs or --unused"),
        (["evict", "00", "--older-than=1h"], "give both"),
        (["evict", "--unused", "--older-than=soon"], "write an age such as"),
        (["pin"], "PACK"),
        (["drain", "--wait=-1"], "write seconds"),
        (["status", "--timeout=0"], "seconds above 0"),
        (["status", "--format=xml"], "xml"),
        (["completion", "perl"], "perl"),
        (["evict", "--unusd"], "--unused"),
        (["dance"], "dance"),
        ([], "COMMAND"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kvctl.main(arguments) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


def test_without_a_daemon_every_command_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["status"], ["packs"], ["evict", "--unused"], ["audit"], ["drain"], ["token"]):
        assert kvctl.main(["--socket", str(tmp_path / "store.sock"), *command]) == 1
        error = capsys.readouterr().err
        assert error.startswith("kvctl: no daemon answers at")
        assert error.count("\n") == 1


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_every_command(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert kvctl.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("status", "evict", "--descendants", "completion"):
        assert word in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=10)


def test_a_token_lives_as_long_as_its_command(daemon: Daemon) -> None:
    """What grpcurl does: reflection for the types, the token as metadata."""
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    command = [sys.executable, "-m", "kvstore_service.kvctl", "--socket", daemon.socket, "token"]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert holder.stdout is not None
    token = holder.stdout.readline().strip()
    metadata = (("kvstore-token", token),)

    class WithToken(grpc.StreamStreamClientInterceptor):
        def intercept_stream_stream(self, continuation, details, requests):  # type: ignore[no-untyped-def]
            return continuation(details._replace(metadata=metadata, timeout=10), requests)

    with grpc.insecure_channel(f"unix:{daemon.socket}") as plain:
        channel = grpc.intercept_channel(plain, WithToken())
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName("kvstore.v1.AdminService").FindMethodByName("GetStatus")
        call = channel.unary_unary(
            "/kvstore.v1.AdminService/GetStatus",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        request = GetMessageClass(method.input_type)()
        answer = call(request, timeout=10, metadata=metadata)
        assert answer.pid == daemon.pid
        holder.communicate("", timeout=10)
        assert holder.returncode == 0
        with pytest.raises(grpc.RpcError) as refused:
            deque((call(request, timeout=10, metadata=metadata) for _ in range(1000)), maxlen=0)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_the_example_runs(worker: TestWorker, daemon: Daemon) -> None:
    session = worker.client.open_session(world.LAYOUT, 4096)
    chain(worker, session, [1])
    command = [sys.executable, "examples/inventory.py", daemon.socket, daemon.broker]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert (done.returncode, "1 packs" in done.stdout) == (0, True), done.stderr


def test_an_audit_of_a_store_that_lost_many_files_among_many_of_others_ends_soon(tmp_path: Path) -> None:
    """That a loss is settled takes one wait, not one for each file."""
    with Daemon(tmp_path) as daemon:
        daemon.stop()
        with closing(Catalog(daemon.data_dir)) as catalog:
            names = [number.to_bytes(PACK_ID_BYTES) for number in range(2000)]
            refs = [PackRef(name, name[16:], 0, world.TOKENS) for name in names]
            rows = [PackRow(ref, NO_PARENT, world.LAYOUT, "uid-0", 0) for ref in refs]
            for row in rows:
                (catalog.packs_dir / row.file).touch()
            catalog.commit_packs(rows)
        daemon.start()
        for number, row in enumerate(rows):
            (catalog.packs_dir / row.file).rename(catalog.packs_dir / f"notes-{number}")
        failed = {check["name"]: check["detail"] for check in audited(daemon) if not check["ok"]}
        assert list(failed) == ["catalogue rows = files", "files = rows + uploads"]
        assert "2000 without their file" in failed["catalogue rows = files"]
        assert "2000 without a row" in failed["files = rows + uploads"]


def audited(daemon: Daemon) -> list[dict[str, Any]]:
    checks: list[dict[str, Any]] = json.loads(run(daemon, "audit", "--format=json", "--timeout=30").stdout)
    return checks


def test_every_command_that_runs_out_of_time_says_so(daemon: Daemon) -> None:
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        with pytest.raises(StoreError, match="the call's deadline has passed"):
            AdminClient(local_channel(daemon.socket), None, 0.3).get_status()
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
