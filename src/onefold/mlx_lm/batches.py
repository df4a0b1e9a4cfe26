"""What mlx-lm's batches ask a prompt cache: layers for a new row, and room for it.

`ModelObserver` (models.py) passes the questions on, and does not keep the cache alive.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

import mlx.nn as nn

from onefold.cache.memory.tokens import Tokens
from onefold.mlx_lm.admission import Admission
from onefold.mlx_lm.models import Models
from onefold.mlx_lm.reasons import Reasons
from onefold.mlx_lm.stores import Stores
from onefold.mlx_lm.tokens import TokenReader


class BatchRows:
    def __init__(
        self,
        models: Models,
        stores: Stores,
        admission: Admission,
        tokens: TokenReader,
        reasons: Reasons,
        lock: threading.RLock,
    ) -> None:
        self.models = models
        self._stores = stores
        self._admission = admission
        self._tokens = tokens
        self._reasons = reasons
        self._lock = lock

    def serve_row(self, model: nn.Module, tokens: list[int]) -> list[Any] | None:
        """Returns layers for a row that nothing was cached for, or None if mlx-lm is to make its own. (A request that
        is in no batch may want a draft model's too; it makes its own, and they are taken over when it puts them
        back.)"""
        with self._lock:
            found = self._tokens.read(tokens)
            missed = self.models.row(model, found) if found is not None and len(found) else None
            if found is None or missed is None:
                return None
            (key,) = missed
            if any(s.table is None and s.cache.inventory.open_leases for s in self._stores.of(key)):
                return None  # all rows of one batch have one format
            return self._reasons.attempt(lambda: self._serve_new(key, model, found), None)

    def _serve_new(self, key: Hashable, model: nn.Module, tokens: Tokens) -> list[Any] | None:
        store = self._stores.served(key, [model])
        if store is None or store.table is None:
            return None
        self._stores.touch(store)
        return store.table.serve(store.cache.lease(tokens))

    def take_on(self) -> None:
        """Makes room for a row that a batch takes on, with the layers that it will have. Raises BudgetError."""
        with self._lock:
            self._admission.admit_row()

    def is_short(self) -> bool:
        """Whether the device has no room for another step of all running rows."""
        with self._lock:
            return self._admission.is_short()
