"""Adapters of a store, read and held against the model that they are to change."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from clew.errors import UserError
from clew.policy.adapter import Adapter, read_adapter
from clew.policy.fit import ForeignAdapter, refuse_foreign_adapter, refuse_other_weights
from clew.policy.model import VisionLanguageModel
from clew.policy.paths import base_fingerprint
from clew.serving.errors import ApiError
from clew.serving.store import AdapterStore, BrokenAdapter, StorageTrouble, UnknownAdapter

_REMEMBERED_S = 5.0  # how long a broken adapter is refused without another look


class AdapterReader:
    """Reads adapters that fit a model.

    Args:
        store: where they are; None has none.
        vlm: the model; its weights are not looked at, so they may be on the meta device.
    """

    def __init__(self, store: AdapterStore | None, vlm: VisionLanguageModel) -> None:
        self._store, self._vlm = store, vlm
        self._fingerprint = base_fingerprint(vlm.path)
        self._broken: dict[str, tuple[float, ApiError]] = {}

    def read(self, name: str) -> Adapter:
        """An adapter that was found whole and fitting. Blocks: disk and network, nothing is computed.

        Raises:
            UnknownAdapter, StorageTrouble, BrokenAdapter, UserError: see ``refusing``.
        """
        if self._store is None:
            raise UnknownAdapter(f"there is no adapter {name}: the server was started without any")
        folder = self._store.fetch(name)
        try:
            adapter = read_adapter(folder)
        except UserError as error:  # its message names a path of this machine
            raise BrokenAdapter(f"adapter {name} can't be read: {error.__cause__}") from error
        adapter = Adapter(name, adapter.tensors, adapter.config)
        try:
            refuse_foreign_adapter(adapter, f"adapter {name}", self._vlm)
            refuse_other_weights(folder, f"adapter {name}", self._vlm, self._fingerprint)
        except ForeignAdapter as error:  # so does this one
            raise BrokenAdapter(
                f"adapter {name} belongs to another model than the one served ({error.reason})"
            ) from error
        return adapter

    @contextlib.contextmanager
    def refusing(self, name: str) -> Iterator[None]:
        """Around all that loads an adapter: makes of what is wrong with it what a client is told.

        Raises:
            ApiError: 404, 422 (again for some seconds, without another look), or 503.
        """
        until, remembered = self._broken.get(name, (0.0, None))
        if remembered is not None and time.monotonic() < until:
            raise remembered
        try:
            yield
        except UnknownAdapter as error:
            raise ApiError(404, str(error), "model_not_found", "model") from error
        except StorageTrouble as error:
            raise ApiError(503, str(error), "storage_unavailable", "model") from error
        except (BrokenAdapter, UserError) as error:
            refusal = ApiError(422, str(error), "broken_adapter", "model")
            if len(self._broken) > 1000:
                self._broken.clear()
            self._broken[name] = (time.monotonic() + _REMEMBERED_S, refusal)
            raise refusal from error
