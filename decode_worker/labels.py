"""Labels that outlive their session: the queries that its heads selected with last, kept beside the last of its packs.

Whoever attaches those packs selects with them before its first step, whose queries then find labels to compare with,
and sets. Only labels are kept: sets follow from them, for the index, the length and the places that there are then.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from decode_worker.engine.session import Session
from decode_worker.failures import is_lost, prefix_changed
from decode_worker.policy.base import Policy
from kvstore_service.client import PackRef, SidecarKey, StoreClient, StoreError
from kvstore_service.shared import index_file
from kvstore_service.shared.index_file import IndexFormatError

KIND = "labels"
_TAG = b"headgate labels of sessions under "


class Labels:
    """Of one policy's sessions. `provenance`: what their steps compute under; labels of others are not found.

    `refused`: labels that the store did not take, or that it gave and that cannot be labels of this policy's."""

    def __init__(self, client: StoreClient, policy: Policy, provenance: bytes) -> None:
        self._client = client
        self._policy = policy
        self._parameters = hashlib.sha256(_TAG + provenance).digest()
        self.refused = 0

    def keep(self, session: Session) -> None:
        """Durable on return, in the place of those of an earlier session. Nothing if a head that selects has none.

        StoreError if the store is lost."""
        ref = session.last_pack
        labels = self._policy.labels(session.slot) if ref is not None else None
        if ref is None or labels is None:
            return
        try:
            content = index_file.save(self._parameters, labels.numpy(), by_record=False)
            self._client.put_sidecar(self._key(ref), content, replace=True)
        except StoreError as error:
            if is_lost(error):
                raise
            self.refused += 1

    def find(self, ref: PackRef) -> torch.Tensor | None:
        """float32[layers, H, g, d], finite, kept by the latest session that ended with this pack; None if none has, or
        the store gives none for now.

        StoreError if the pack is not what it was, or the store is lost."""
        try:
            blob = self._client.get_sidecar(self._key(ref))
        except StoreError as error:
            if is_lost(error) or prefix_changed(error):
                raise
            self.refused += 1
            return None
        if blob is None:
            return None
        try:
            parameters, labels = index_file.load(blob)
        except IndexFormatError:
            self.refused += 1
            return None
        shape = self._policy.state.label.shape
        fits = labels.dtype == np.float32 and labels.shape == (shape[1], *shape[3:])
        if not fits or parameters != self._parameters or not np.isfinite(labels).all():
            self.refused += 1
            return None
        return torch.from_numpy(labels.copy())

    def _key(self, ref: PackRef) -> SidecarKey:
        return SidecarKey(ref.pack_id, ref.build, KIND, self._parameters)
