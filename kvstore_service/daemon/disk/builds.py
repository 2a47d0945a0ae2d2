"""Builds: half random, half a tenant's seal, so that a pack's file alone says whose it is."""

import hashlib
import hmac
import secrets

from kvstore_service.shared.types import BUILD_BYTES

_RANDOM_BYTES = BUILD_BYTES // 2


def new_build(tenant_key: bytes, pack_id: bytes) -> bytes:
    return _sealed(tenant_key, pack_id, secrets.token_bytes(_RANDOM_BYTES))


def made_by(tenant_key: bytes, pack_id: bytes, build: bytes) -> bool:
    """Whether the store has made this build for the tenant with this key."""
    return hmac.compare_digest(build, _sealed(tenant_key, pack_id, build[:_RANDOM_BYTES]))


def _sealed(tenant_key: bytes, pack_id: bytes, random: bytes) -> bytes:
    seal = hmac.new(tenant_key, b"build" + pack_id + random, hashlib.sha256).digest()
    return random + seal[: BUILD_BYTES - _RANDOM_BYTES]
