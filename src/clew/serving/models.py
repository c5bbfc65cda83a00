"""The names that are served: the base model, and ``BASE:ADAPTER`` for each adapter of the store."""

from __future__ import annotations

import asyncio
import time

from clew.errors import UserError
from clew.serving.errors import ApiError
from clew.serving.names import check_adapter_name
from clew.serving.store import AdapterStore, StorageTrouble

_FRESH_S = 2.0


class Models:
    """Looks names up, so that what is not there never reaches the engine.

    Attributes:
        base: name of the base model.
    """

    def __init__(self, base: str, store: AdapterStore | None) -> None:
        self.base = base
        self._store = store
        self._names: list[str] = []
        self._looked: float | None = None
        self._lock = asyncio.Lock()

    async def adapters(self) -> list[str]:
        """Names of the whole adapters, at most two seconds old.

        Raises:
            ApiError: 503: the store can't be read.
        """
        if self._store is None:
            return []
        async with self._lock:
            if self._looked is None or time.monotonic() - self._looked > _FRESH_S:
                try:
                    self._names = await asyncio.to_thread(self._store.names)
                except StorageTrouble as error:
                    raise ApiError(503, str(error), "storage_unavailable") from error
                self._looked = time.monotonic()
        return self._names

    async def resolve(self, model: str) -> str:
        """The adapter that a model's name means; empty for the base model.

        Raises:
            ApiError: 404: there is no such model; 503: the store can't be read.
        """
        base, colon, adapter = model.partition(":")
        if base == self.base and not colon:
            return ""
        try:
            known = base == self.base and check_adapter_name(adapter) in await self.adapters()
        except UserError:
            known = False
        if not known:
            raise ApiError(404, f"the model {model[:200]!a} does not exist", "model_not_found", "model")
        return adapter
