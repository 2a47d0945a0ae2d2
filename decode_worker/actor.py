"""The Ray actor: a thin shell around `Worker`. With `cluster`, the only module that imports ray."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import ray

from decode_worker.config import ENVIRONMENT, WorkerConfig
from decode_worker.scheduler import Output, Request
from decode_worker.worker import PrefillReport, Worker
from kvstore_service.shared.scratch import Scratch, for_sockets

CLOSE_S = 30.0
CONCURRENCY = 64  # calls that an actor takes at a time; what they ask for waits for slots
CONTROL = "control"
PORT_VARIABLE = "RAY_GCS_SERVER_PORT"
END_S = 5.0
TICK_S = 0.25
SERVERS = ("gcs_server", "raylet")
# Of the 107 bytes of a socket's path, Ray's names below its directory take the rest.
PARENT_BYTES_MAX = 18


@contextlib.contextmanager
def local_ray(cpus: int = 1) -> Iterator[None]:
    """A Ray of one's own on this machine, on loopback, without dashboard; on exit nothing of it is left.

    RuntimeError if it does not start."""
    os.environ.setdefault("RAY_EXPORT_COUNTER_AS_GAUGE", "0")
    with Scratch("headgate-ray", for_sockets(PARENT_BYTES_MAX), _end_writers) as scratch:
        try:
            _start_ray(cpus, str(scratch.path))
            yield
        finally:
            ray.shutdown()


def _start_ray(cpus: int, directory: str) -> None:
    own = signal.getsignal(signal.SIGTERM)
    _check_port()
    try:
        _init(cpus, directory)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RuntimeError(f"Ray did not start: {reason}; free its ports and memory, or give --no-ray") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, own)  # Ray put its own in place


def _check_port() -> None:
    """Ray itself would notice after 40 s."""
    if port := os.environ.get(PORT_VARIABLE):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", int(port)))
            except (OSError, ValueError, OverflowError) as error:
                reason = getattr(error, "strerror", None) or "no port number"
                raise RuntimeError(f"Ray did not start: {PORT_VARIABLE}={port}: {reason}; unset it") from error


def _end_writers(directory: Path) -> None:
    """Kills this user's processes that write below `directory`: Ray's agents outlive a Ray that was killed."""
    deadline = time.monotonic() + END_S
    while (writers := [pid for pid in _processes() if _writes_below(pid, directory)]) and time.monotonic() < deadline:
        for pid in writers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _writes_below(pid: int, directory: Path) -> bool:
    """False also for what may not be looked at, and for this process."""
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            writable = link.lstat().st_mode & 0o200
            if pid != os.getpid() and writable and link.readlink().is_relative_to(directory):
                return True
    return False


def _dead_server() -> str | None:
    """A server of a Ray that this process started, if it has died."""
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with contextlib.suppress(OSError):
            name, _, state = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].partition(") ")
            if name in SERVERS and state.startswith("Z"):
                return name
    return None


def _init(cpus: int, directory: str) -> None:
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


def worker_actor(**options: Any) -> Any:
    """`Worker` as an actor's class. What ends or watches a call has threads of its own: the others may all wait."""
    grouped = ray.remote(concurrency_groups={CONTROL: 2})(Worker)
    environment = {"env_vars": {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}}
    return grouped.options(num_cpus=1, max_concurrency=CONCURRENCY, runtime_env=environment, **options)


class RemoteWorker:
    """A `Worker` in a Ray actor; every public method of it can be called here and waits for the result.

    Errors of the worker come as they are; RuntimeError if its process died."""

    def __init__(self, config: WorkerConfig, call_s: float = 3600.0, **options: Any) -> None:
        """options: of the actor, such as num_gpus or scheduling_strategy."""
        self._call_s = call_s
        self._actor = worker_actor(**options).remote(config)

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._call, name)

    def prefill_document(self, ids: Sequence[int], progress: Callable[[int, int], None] | None = None) -> PrefillReport:
        """As Worker's; asks the actor how far it is while it computes."""
        asked: list[Any] = []

        def ask() -> None:
            if progress is None:
                return
            if asked and ray.wait(asked, timeout=0)[0]:
                progress(*ray.get(asked.pop()))
            if not asked:
                asked.append(self._control("progress").remote())

        report: PrefillReport = self._call("prefill_document", ids, meanwhile=ask)
        return report

    def generate(self, request: Request) -> Iterator[Output]:
        """As Worker's; several threads may generate at once. Closing the iterator cancels the request."""
        request = replace(request, key=request.key or secrets.token_hex(8))
        answers = self._actor.generate.remote(request)
        ended = False
        try:
            while True:
                with self._explaining("generate"):
                    self._wait(answers, "generate")
                    try:
                        answer = next(answers)
                    except StopIteration:
                        ended = True
                        return
                    output: Output = ray.get(answer)
                yield output
        finally:
            # Whoever closes it may be the collector, after Ray's end: a call would start another Ray.
            if not ended and ray.is_initialized():
                ray.cancel(answers)  # the actor may not have begun it, and knows no key then
                self._control("cancel").remote(request.key)

    def _call(self, name: str, *args: Any, meanwhile: Callable[[], None] = lambda: None, **kwargs: Any) -> Any:
        with self._explaining(name):
            answer = getattr(self._actor, name).remote(*args, **kwargs)
            self._wait(answer, name, meanwhile)
            return ray.get(answer)

    @contextlib.contextmanager
    def _explaining(self, name: str) -> Iterator[None]:
        try:
            yield
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayActorError as error:
            if error.actor_init_failed:  # Ray gives the worker's own error as text only, in the last line
                raise RuntimeError(str(error).strip().splitlines()[-1]) from error
            raise RuntimeError(
                f"the decode worker died in {name} (killed, or out of memory?); --no-ray runs it in this process"
            ) from error

    def _wait(self, answer: Any, name: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Ray's own word for a server of it that died comes after a minute, and ends this process."""
        deadline = time.monotonic() + self._call_s
        while (server := _dead_server()) is None:
            if ray.wait([answer], timeout=TICK_S, fetch_local=False)[0]:
                return
            meanwhile()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the decode worker was in {name} for more than {self._call_s:.0f} s")
        raise RuntimeError(f"Ray's {server} died while the decode worker was in {name}; run the command again")

    def close(self) -> None:
        """Generations under way end with an error. Idempotent; an actor that does not answer is killed."""
        with contextlib.suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            ray.get(self._control("close").remote(), timeout=CLOSE_S)
        ray.kill(self._actor)

    def _control(self, name: str) -> Any:
        return getattr(self._actor, name).options(concurrency_group=CONTROL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: object) -> None:
        """After an error a call may still run in the actor: the daemon frees what a killed worker held."""
        if kind is None:
            self.close()
        else:
            ray.kill(self._actor)
