"""The policy on a Ray cluster: one actor a rank, and what the training loop sees of them all."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from clew.checkpoint import CheckpointStore, write_directory
from clew.checkpoint.patience import with_patience
from clew.errors import RunFailed, UserError
from clew.observe.hung_jobs import post_rules, step_line
from clew.policy.adapter import StoredAdapter, write_adapter
from clew.recipe import Recipe
from clew.runtime.devices import Whereabouts, whereabouts
from clew.runtime.process import configure_environments
from clew.runtime.ray_errors import cause_of, describe
from clew.training.learner import Learner
from clew.training.ranks import Ranks
from clew.training.update import Sample

COLLECTIVE_TIMEOUT_S = 1800.0
_LAST_WORDS_S = 15.0


class PolicyWorker:
    """One rank, in a process of its own. All ranks are called together, but for ``address`` and ``watch``."""

    def __init__(self, recipe: Recipe, rank: int, ranks: int, device: str, backend: str, threads: int) -> None:
        torch.set_num_threads(threads)
        configure_environments(recipe)
        self.recipe, self.ranks, self.device, self.backend = recipe, Ranks(rank, ranks), device, backend
        self._stores: dict[Path, CheckpointStore] = {}  # a store knows what it has hashed already
        self._watched = False

    def address(self) -> str:
        """A free port on this machine at which ranks can meet: HOST:PORT."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def start(self, address: str, marker: Path) -> Whereabouts:
        """Joins the other ranks and loads the model.

        Args:
            address: where rank 0 listens.
            marker: a file of the run directory, by which the driver knows that every machine sees it.
        """
        if not marker.is_file():
            raise UserError(
                f"--run {marker.parent} is not visible on machine {socket.gethostname()}: "
                "put it on a file system that all machines share (runtime.shared_dir)"
            )
        if self.ranks.size > 1:
            dist.init_process_group(
                self.backend,
                init_method=f"tcp://{address}",
                rank=self.ranks.rank,
                world_size=self.ranks.size,
                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            )
        self.learner = Learner(self.recipe, self.ranks, self.device)
        self._give_back()
        return whereabouts(self.device)

    def watch(self) -> str | None:
        """Has HyperPod watch this worker's output, where it can; returns a line about it (see ``post_rules``)."""
        said = post_rules(self.recipe)
        self._watched = said is not None
        return said

    def _give_back(self) -> None:
        """Gives the memory that torch holds in reserve back to the device: a colocated engine needs it to wake up."""
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def restore(self, folder: Path) -> None:
        """See ``Policy.restore``."""
        self.learner.restore(folder)

    def update(self, batch: tuple[list[Sample], list[bool]], step: int) -> dict[str, float]:
        """See ``Policy.update``."""
        metrics = self.learner.update(*batch, step)
        self._give_back()
        if self._watched:
            print(step_line(step), flush=True)
        return metrics

    def publish(self, step: int, root: Path, session: int) -> StoredAdapter | None:
        """Gathers the adapter; rank 0 writes it as a new version below ``root`` and returns that."""
        adapter = self.learner.publish(step)
        if self.ranks.rank:
            return None
        digest = adapter.content_hash  # of hundreds of megabytes, at every step
        name = f"step-{step:06d}-a{session}-{digest[:8]}"
        facts = {"adapter": name, "sha256": digest}
        folder = write_directory(root / name, lambda staging: write_adapter(adapter, staging), facts)
        return StoredAdapter(name, folder)

    def export(self, folder: Path, card: dict[str, Any]) -> None:
        """See ``Policy.export``."""
        self.learner.export(folder, card)

    def save(self, root: Path, keep: int | None, step: int, state: str, facts: dict[str, Any]) -> None:
        """See ``Policy.save``."""
        store = self._stores.setdefault(root, CheckpointStore(root, keep))
        self.learner.save(store, step, state, facts)


class RayPolicy:
    """A ``Policy`` (see ``clew.training.policy``) whose ranks are actors.

    Args:
        workers: the actors, by rank.
        root: folder of published adapter versions.
        session: number of this start of the run; versions are named by it, so that no start overwrites another's.
        before_update: called before the policy learns.
        note: told of what goes wrong and is tried again.
    """

    def __init__(
        self,
        workers: list[Any],
        recipe: Recipe,
        root: Path,
        session: int,
        before_update: Callable[[], None],
        note: Callable[[str], None],
    ) -> None:
        self.workers, self.recipe, self.root, self.session = workers, recipe, root, session
        self.before_update, self.note = before_update, note
        self.doing = "at the start"

    def start(self, marker: Path) -> list[Whereabouts]:
        """Has all ranks meet and load the model; returns where they are."""
        first = self.workers[0].address.remote()
        try:
            address = ray.get(first)
        except RayError:
            raise self._reason([first]) from None
        places: list[Whereabouts] = self._all("start", address, marker)
        self._watch(places)
        return places

    def _watch(self, places: list[Whereabouts]) -> None:
        """Asks the first rank of each machine to have itself watched for hangs."""
        first = {place.node: worker for place, worker in reversed(list(zip(places, self.workers, strict=True)))}
        try:
            said = ray.get([worker.watch.remote() for worker in first.values()])
        except RayError as error:
            said = [f"warning: hung jobs are not watched for ({describe(cause_of(error))})"]
        for line in dict.fromkeys(filter(None, said)):
            self.note(line)

    def restore(self, folder: Path) -> None:
        """See ``Policy.restore``."""
        self._all("restore", folder)

    def update(self, samples: list[Sample], used: list[bool], step: int) -> dict[str, float]:
        """See ``Policy.update``."""
        self.doing = f"in the update of step {step}"
        self.before_update()
        metrics: dict[str, float] = self._all("update", ray.put((samples, used)), step)[0]
        return metrics

    def publish(self, step: int) -> StoredAdapter:
        """See ``Policy.publish``: rank 0 writes the version to shared storage; its weights never come here."""
        self.doing = f"while the adapter of step {step} was written"
        version: StoredAdapter = self._patiently("publish", step, self.root, self.session)[0]
        return version

    def export(self, folder: Path, card: dict[str, Any]) -> None:
        """See ``Policy.export``."""
        self.doing = f"in the export of step {card['step']}"
        self._patiently("export", Path(os.path.abspath(folder)), card)  # workers have working directories of their own

    def save(self, store: CheckpointStore, step: int, state: str, facts: dict[str, Any]) -> None:
        """See ``Policy.save``."""
        self.doing = f"in the checkpoint of step {step}"
        self._patiently("save", store.root, store.keep, step, state, facts)

    def _patiently(self, method: str, *arguments: Any) -> list[Any]:
        return with_patience(lambda: self._all(method, *arguments), self.recipe.runtime.storage_patience_s, self.note)

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method on all ranks and returns what they return, by rank.

        Raises:
            RunFailed: a worker died or failed.
            UserError: as raised by a worker.
        """
        calls = [getattr(worker, method).remote(*arguments) for worker in self.workers]
        waiting = list(calls)
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1)
            try:
                ray.get(done[0])
            except RayError:
                raise self._reason(calls) from None
        return ray.get(calls)

    def _reason(self, calls: list[Any]) -> Exception:
        """Why a call failed: the death of a rank comes before what it did to the others."""
        # A rank's death shows as a broken connection on the others, maybe before it shows as a death.
        ray.wait(calls, num_returns=len(calls), timeout=_LAST_WORDS_S)
        errors: dict[int, RayError] = {}
        for rank, call in enumerate(calls):
            try:
                ray.get(call, timeout=0)
            except GetTimeoutError:
                continue
            except RayError as error:
                errors[rank] = error
        deaths = [rank for rank, reason in errors.items() if not isinstance(reason, RayTaskError)]
        faults = [reason.cause for reason in errors.values() if isinstance(reason, RayTaskError)]
        mendable = [fault for fault in faults if isinstance(fault, UserError)]
        if mendable and not deaths:
            return mendable[0]
        rank = (deaths or list(errors))[0]
        reason = cause_of(errors[rank])
        what = "died" if deaths else "failed"
        return RunFailed(f"policy worker {rank} of {len(self.workers)} {what} {self.doing} ({describe(reason)})")
