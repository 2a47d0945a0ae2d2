"""grpc.health.v1: whether the daemon takes new work. Check alone; whoever wants to watch asks again."""

from collections.abc import Callable

from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore_service.daemon.front.call import Call

SERVICE = "grpc.health.v1.Health"
METHODS = f"/{SERVICE}/"


class HealthService(health_pb2_grpc.HealthServicer):
    """Answers from memory, at once, for the daemon as a whole: which service is meant is not read (see `Gate`)."""

    def __init__(self, draining: Callable[[], bool]) -> None:
        self._draining = draining

    def Check(self, request: None, context: Call) -> health_pb2.HealthCheckResponse:
        states = health_pb2.HealthCheckResponse
        return states(status=states.NOT_SERVING if self._draining() else states.SERVING)
