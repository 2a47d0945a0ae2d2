"""One worker of a storm: python -m tests.isolation.storm KIND SOCKET BROKER. Prints a line when it is under way.

A `decoder` waits for a line on stdin, then fills its ring with hot tickets, and prints how many bytes they are when all
are served. The others keep their rings full, whatever their tickets end in.
"""

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from bench.neighbour import PLACES, RECORD_BYTES, WAIT_US, Address, Document, Neighbour, Post, require_ok
from decode_worker import _native
from kvstore_service.client import RingGeometry

RUNS, PAIRS, TICKETS = 64, 1024, 16
GEOMETRY = RingGeometry(TICKETS, RUNS, RUNS * PAIRS)
HOT, COLD = Document("hot", 4096), Document("cold", 65536)


def _flood(worker: Neighbour) -> Iterator[Post]:
    return itertools.repeat(worker.gather(np.arange(PAIRS), RUNS))


def _bulk(worker: Neighbour) -> Iterator[Post]:
    return itertools.cycle(worker.range(first, PLACES, RUNS) for first in range(0, worker.tokens, PLACES))


def _hints(worker: Neighbour) -> Iterator[Post]:
    rng = np.random.default_rng(1)
    for reads in _reads(worker, rng):
        yield Post(_native.OP_PROMOTE, reads.runs, reads.pairs)


def _reads(worker: Neighbour, rng: np.random.Generator | None = None) -> Iterator[Post]:
    """Of records from all over the document."""
    rng = rng or np.random.default_rng(0)
    while True:
        yield worker.gather(np.sort(rng.choice(worker.tokens, PAIRS, replace=False)), RUNS)


KINDS: dict[str, tuple[Document, Callable[[Neighbour], Iterator[Post]]]] = {
    "flood": (HOT, _flood),
    "bulk": (COLD, _bulk),
    "hints": (COLD, _hints),
    "reads": (COLD, _reads),
}


def main() -> None:
    kind, socket, broker = sys.argv[1:]
    document, tickets = KINDS.get(kind, (HOT, _flood))
    with Neighbour(Address(socket, broker), document, GEOMETRY) as worker:
        if kind == "decoder":
            decode(worker)
        else:
            storm(worker, tickets(worker))


def decode(worker: Neighbour) -> None:
    worker.fetch(worker.range(0, HOT.tokens, 2))
    print("ready", flush=True)
    sys.stdin.readline()
    for seq in [post(worker, ticket) for ticket in itertools.islice(_flood(worker), TICKETS)]:
        require_ok(worker.ring.wait(seq, WAIT_US, 0))
    print(TICKETS * RUNS * PAIRS * RECORD_BYTES, flush=True)


def storm(worker: Neighbour, tickets: Iterator[Post]) -> None:
    posted: deque[int] = deque()
    for count, ticket in enumerate(tickets, 1):
        if len(posted) == TICKETS:
            worker.ring.wait(posted.popleft(), WAIT_US, 0)
        posted.append(post(worker, ticket))
        if count == TICKETS:
            print("ready", flush=True)


def post(worker: Neighbour, ticket: Post) -> int:
    """Sleeps until there is credit."""
    return worker.ring.post(ticket.op, 0, 0, ticket.runs, ticket.pairs, WAIT_US)


if __name__ == "__main__":
    main()
