"""The store: one room per noun, over the state that they share. `services` calls `store.NOUN.verb`."""

from kvstore_service.daemon import native
from kvstore_service.daemon.config import Config
from kvstore_service.daemon.disk.catalog import Catalog
from kvstore_service.daemon.disk.cost import Microseconds
from kvstore_service.daemon.store.explain import Explain
from kvstore_service.daemon.store.indexes import Indexes
from kvstore_service.daemon.store.operation import Operation
from kvstore_service.daemon.store.packs import Packs
from kvstore_service.daemon.store.prefixes import Prefixes
from kvstore_service.daemon.store.retier import Retier
from kvstore_service.daemon.store.sessions import Sessions
from kvstore_service.daemon.store.slots import Slots
from kvstore_service.daemon.store.state import State
from kvstore_service.daemon.store.upkeep import Upkeep
from kvstore_service.daemon.store.workers import Workers


class Store:
    """Thread-safe. Takes over `plane` and closes it."""

    def __init__(
        self,
        config: Config,
        catalog: Catalog,
        plane: native.DataPlane,
        disk_cost: Microseconds = native.DISK_COST,
    ) -> None:
        self.state = state = State(config, catalog, plane, disk_cost)
        self.workers = Workers(state)
        self.slots = Slots(state)
        self.sessions = Sessions(state, self.slots)
        self.prefixes = Prefixes(state)
        self.packs = Packs(state, self.sessions)
        self.indexes = Indexes(state)
        self.retier = Retier(state)
        self.operation = Operation(state, self.retier)
        self.explain = Explain(state)
        chores = [
            self.packs.expire, state.room.relieve, state.ballast.take_on, state.leases.expire, state.keep_uses,
            self.workers.release_leaving, self.retier.chore,
        ]  # fmt: skip
        self._upkeep = Upkeep(chores)

    def close(self) -> None:
        """Releases every worker; what was committed stays."""
        self._upkeep.close()
        for worker in self.state.registry.workers():
            self.workers.release(worker)
        self.retier.close()
        self.state.verifier.close()
        self.state.uploads.close()
        self.state.plane.close()
        self.state.catalog.close()
