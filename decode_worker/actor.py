"""The Ray actor: a thin shell around `Worker`. With serve and jobs, the only modules that import ray."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import ray

from decode_worker.config import WorkerConfig
from decode_worker.worker import Worker

START_S = 120.0


@contextlib.contextmanager
def local_ray(cpus: int = 1) -> Iterator[None]:
    """A Ray of one's own on this machine, on loopback, without dashboard; on exit nothing of it is left."""
    os.environ.setdefault("RAY_EXPORT_COUNTER_AS_GAUGE", "0")
    with tempfile.TemporaryDirectory(prefix="hg-ray-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        _start_ray(cpus, directory)
        try:
            yield
        finally:
            ray.shutdown()


def _start_ray(cpus: int, directory: str) -> None:
    ray.init(
        address="local",
        num_cpus=cpus,
        _node_ip_address="127.0.0.1",
        _temp_dir=directory,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
        object_store_memory=80 << 20,
        _system_config={"enable_worker_prestart": False},
    )


class RemoteWorker:
    """A `Worker` in a Ray actor; every public method of it can be called here and waits for the result."""

    def __init__(self, config: WorkerConfig, call_s: float = 3600.0, **options: Any) -> None:
        """options: of the actor, such as num_gpus or scheduling_strategy."""
        self._call_s = call_s
        self._actor = ray.remote(Worker).options(num_cpus=1, max_concurrency=2, **options).remote(config)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return ray.get(method.remote(*args, **kwargs), timeout=self._call_s)

        return call

    def close(self) -> None:
        with contextlib.suppress(ray.exceptions.RayActorError):
            ray.get(self._actor.close.remote(), timeout=START_S)
        ray.kill(self._actor)
