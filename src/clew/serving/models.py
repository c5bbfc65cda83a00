"""The names that are served: the base model, and ``BASE:ADAPTER`` for each adapter of the store."""

from __future__ import annotations

import asyncio
import math
import time

from clew.serving.errors import ApiError
from clew.serving.names import is_adapter_name
from clew.serving.store import AdapterStore, StorageTrouble

_FRESH_S = 2.0
# A name that was there is believed that long without another look, and longer while the store is away or slow: its
# adapter may be loaded, and whoever asks for it must not wait for the store.
_TRUSTED_S = 60.0


class Models:
    """Looks names up, so that what is not there never reaches the engine.

    Attributes:
        base: name of the base model.
    """

    def __init__(self, base: str, store: AdapterStore | None) -> None:
        self.base = base
        self._store = store
        self._names: list[str] = []
        self._trouble: ApiError | None = None  # of the last look
        self._looked = -math.inf
        self._lock = asyncio.Lock()

    async def adapters(self) -> list[str]:
        """Names of the whole adapters, at most two seconds old.

        Raises:
            ApiError: 503: the store can't be read.
        """
        if self._store is None:
            return []
        async with self._lock:
            if time.monotonic() - self._looked > _FRESH_S:
                try:
                    self._names, self._trouble = await asyncio.to_thread(self._store.names), None
                except StorageTrouble as error:
                    self._trouble = ApiError(503, str(error), "storage_unavailable")
                self._looked = time.monotonic()
            if self._trouble is not None:
                raise self._trouble
        return self._names

    async def _has(self, adapter: str) -> bool:
        known = adapter in self._names
        if known and (self._lock.locked() or time.monotonic() - self._looked < _TRUSTED_S):
            return True
        try:
            return adapter in await self.adapters()
        except ApiError:
            if not known:
                raise
            return True

    async def resolve(self, model: str) -> str:
        """The adapter that a model's name means; empty for the base model.

        Raises:
            ApiError: 404: there is no such model; 503: the store can't be read.
        """
        base, colon, adapter = model.partition(":")
        if base == self.base and not colon:
            return ""
        if base != self.base or not is_adapter_name(adapter) or not await self._has(adapter):
            raise ApiError(404, f"the model {model[:200]!a} does not exist", "model_not_found", "model")
        return adapter
