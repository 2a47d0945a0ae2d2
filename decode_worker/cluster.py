"""One decode worker actor on every node of a Ray cluster, each joined to its own node's daemon.

`python -m decode_worker.cluster --model DIR` may run on any node at any time: it places what is missing. Clients find
a node's worker by name, `ray.get_actor("headgate-<node id>", namespace="headgate")`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from decode_worker.actor import worker_actor
from decode_worker.config import DEFAULTS, KEYS, ConfigError, WorkerConfig
from decode_worker.device import gpus_of
from kvstore_service.shared.settings import Parser, add_flags

NAMESPACE = "headgate"
START_S = 300.0


def actor_name(node_id: str) -> str:
    return f"headgate-{node_id}"


def place_workers(config: WorkerConfig) -> list[str]:
    """Starts the missing actors and returns the node ids that have one. The actors outlive the caller (detached).

    An actor is bound to its node, because it shares memory with that node's daemon; it is gone when the node is.
    """
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    actors = [
        worker_actor(
            name=actor_name(node),
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            num_gpus=gpus_of(config.kernels),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(config)
        for node in nodes
    ]
    ray.get([actor.ping.remote() for actor in actors], timeout=START_S)
    return nodes


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m decode_worker.cluster", description=__doc__, allow_abbrev=False)
    add_flags(parser, KEYS, DEFAULTS)
    try:
        config = WorkerConfig.resolve(parser.parse_args(argv))
    except ConfigError as error:
        return _fail(error, 2)
    try:
        ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        nodes = place_workers(config)
    except ConnectionError:
        return _fail(
            "no Ray cluster answers on this node; start one, see ray_cluster.yaml or `ray start --head`, "
            "or set RAY_AUTH_MODE=token if it wants a token",
            1,
        )
    except ray.exceptions.GetTimeoutError:
        return _fail(f"no decode worker became ready within {START_S:.0f} s; see `ray status` for free CPUs", 1)
    except (ray.exceptions.RayError, RuntimeError, ValueError) as error:
        return _fail(str(error).strip().splitlines()[-1], 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    finally:
        ray.shutdown()
    print(f"{len(nodes)} nodes have a decode worker")
    return 0


def _fail(error: object, status: int) -> int:
    print(f"cluster: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
