"""Tenants' keys beside the catalogue, so that its loss costs no pack: ids and seals are made with them. 0600."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from kvstore_service.daemon.disk.files import sync_directory
from kvstore_service.shared.types import StoreError


def load(path: Path) -> dict[str, bytes]:
    """Empty if there is no such file. DATA_LOSS if it cannot be understood."""
    try:
        return {str(tenant): bytes.fromhex(key) for tenant, key in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, TypeError) as error:
        raise StoreError("DATA_LOSS", f"{path} cannot be read ({error}); remove it if the catalogue is whole") from None


def store(path: Path, keys: Mapping[str, bytes]) -> None:
    """Whole or not at all; durable on return."""
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        json.dump({tenant: key.hex() for tenant, key in keys.items()}, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
    sync_directory(path.parent)
