"""Another user, for real: drops to the user id of its order, tries everything, prints how each attempt ended.

Order (JSON on stdin): uid, gid, socket, broker, and `names`, the ids of somebody else's things;
without these it sends garbage.
"""

import contextlib
import json
import os
import sys
from typing import Any

import grpc

from kvstore_service._proto import store_service_pb2 as pb
from kvstore_service._proto import store_service_pb2_grpc as pb_grpc
from kvstore_service.client.connection import BrokerConnection
from kvstore_service.shared import wire
from kvstore_service.shared.types import StoreError
from tests.hostile import calls
from tests.hostile.victim import named
from tests.support.world import LAYOUT


def attempt(order: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {"broker": "", "own": {}}
    metadata = calls.token("0" * 64)
    with contextlib.ExitStack() as stack:
        try:
            connection = BrokerConnection(order["broker"], "stranger", 10.0)
            stack.callback(connection.close)
            metadata = calls.token(connection.token)
        except StoreError as error:
            result["broker"] = str(error)
        channel = stack.enter_context(grpc.insecure_channel(f"unix:{order['socket']}"))
        names = order.get("names")
        if names:
            store = pb_grpc.StoreServiceStub(channel)
            ring = pb.RingGeometry(tickets=2, runs_max=1, pairs_max=1)
            memory = pb.RegisterWorkerRequest(slots=1, window_bytes=4096, staging_bytes=4096, rings=[ring])
            store.RegisterWorker(memory, timeout=10, metadata=metadata)
            store.ServeRings(pb.ServeRingsRequest(), timeout=10, metadata=metadata)
            request = pb.OpenSessionRequest(layout=wire.layout_to(LAYOUT), declared_max_tokens=4096)
            session = store.OpenSession(request, timeout=10, metadata=metadata).session_id
            result["own"] = tried(channel, metadata, {**names, "session_id": session}, keeps_memory=True)
            lookup = calls.fill(pb.LookupPrefixRequest(), named(names))
            result["found"] = len(store.LookupPrefix(lookup, timeout=10, metadata=metadata).packs)
        result["codes"] = tried(channel, metadata, names)
    return result


def tried(
    channel: grpc.Channel, metadata: calls.Metadata, names: dict[str, Any] | None, keeps_memory: bool = False
) -> dict[str, str]:
    codes = {}
    last = ("CloseSession", "UnregisterWorker")
    for method in sorted(calls.METHODS, key=lambda method: method.name in last):
        if keeps_memory and method.name == "UnregisterWorker":
            continue
        payload = calls.GARBAGE
        if names and not calls.admin(method):
            payload = calls.fill(calls.request_of(method), named(names)).SerializeToString()
        codes[calls.path_of(method)] = calls.code_of(channel, method, payload, metadata)
    return codes


if __name__ == "__main__":
    task = json.load(sys.stdin)
    os.setgroups([])
    os.setresgid(task["gid"], task["gid"], task["gid"])
    os.setresuid(task["uid"], task["uid"], task["uid"])
    json.dump(attempt(task), sys.stdout)
