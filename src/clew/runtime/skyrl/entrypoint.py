"""What a SkyRL run executes: SkyRL's own experiment, with Clew's environment known to it (needs ``skyrl``).

    python -m clew.runtime.skyrl.entrypoint KEY=VALUE ...      the list that `clew train RECIPE --dry-run` prints

`clew train` does the same, after it has written the tasks and looked at the checkpoints.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import ray

from clew.envs.visgym.fork import VARIABLE as VISGYM
from clew.errors import UserError
from clew.runtime.skyrl.validate import INSTALL, installed, prepare_import, validate


@ray.remote(num_cpus=1)
def train_task(config: Any, env_processes: int | None = None) -> None:
    """The driver of the training, on a machine of the cluster: Ray keeps it off a head without CPUs."""
    prepare_import()
    from skyrl.train.entrypoints.main_base import BasePPOExp

    from clew.envs.visgym import configure
    from clew.runtime.skyrl.env import register_env

    register_env()  # SkyRL plays in this process
    if env_processes is not None:
        configure(None, env_processes)
    BasePPOExp(config).run()


def run(config: Any, env_processes: int | None = None) -> None:
    """Connects to the cluster of RAY_ADDRESS, or starts Ray here, and trains.

    ``CLEW_VISGYM``, where it is set here, is set in the task that plays too.

    Args:
        config: what ``validate`` gave.
        env_processes: children that VisGym's environments are spread over; None: as many as by default.

    Raises:
        ray.exceptions.RayError: the training failed, or a machine of it.
    """
    prepare_import()
    from skyrl.train.utils.utils import initialize_ray

    initialize_ray(config)
    # A machine of a cluster has its own variables, and SkyRL hands on only those it knows. Ray adds these to them.
    variables = {VISGYM: os.environ[VISGYM]} if VISGYM in os.environ else {}
    ray.get(train_task.options(runtime_env={"env_vars": variables}).remote(config, env_processes))


def main() -> int:
    """Runs SkyRL with the overrides on the command line; 2: there is something wrong with them."""
    try:
        if not installed():
            raise UserError(INSTALL)
        config = validate(sys.argv[1:])
    except UserError as error:
        print(f"clew: error: {error}", file=sys.stderr)
        return 2
    run(config)
    return 0


if __name__ == "__main__":
    # By its name: the task must be found in the module, not in __main__, on the other machines.
    from clew.runtime.skyrl.entrypoint import main as importable_main

    sys.exit(importable_main())
