"""`full`: every head is resident, nothing is ever selected. The yardstick of accuracy and of memory."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from decode_worker.policy.qsac import QsacPolicy
from decode_worker.policy.settings import PolicySettings
from decode_worker.retrieval.base import Retriever


class FullPolicy(QsacPolicy):
    name: ClassVar[str] = "full"

    def __init__(self, settings: PolicySettings, retriever: Retriever) -> None:
        super().__init__(replace(settings, resident=np.ones_like(settings.resident)), retriever)
