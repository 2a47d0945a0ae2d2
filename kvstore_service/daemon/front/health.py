"""grpc.health.v1: whether the daemon takes new work. Check alone; whoever wants to watch asks again."""

from collections.abc import Callable

from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore_service.daemon.front.call import Call
from kvstore_service.shared.types import StoreError

SERVICE = "grpc.health.v1.Health"
METHODS = f"/{SERVICE}/"


class HealthService(health_pb2_grpc.HealthServicer):
    """Answers from memory, at once."""

    def __init__(self, services: tuple[str, ...], draining: Callable[[], bool]) -> None:
        self._services = ("", *services)
        self._draining = draining

    def Check(self, request: health_pb2.HealthCheckRequest, context: Call) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            raise StoreError("NOT_FOUND", f"no service {request.service[:100]!r} is served here")
        states = health_pb2.HealthCheckResponse
        return states(status=states.NOT_SERVING if self._draining() else states.SERVING)
