"""VisGym's tasks, each in a process apart from the Gymnasium that is installed here."""

from clew.envs.visgym import fork, pool
from clew.envs.visgym.env import PREFIX, VisGymEnv, VisGymMaze

__all__ = ["PREFIX", "VisGymEnv", "VisGymMaze", "configure", "make_visgym"]


def configure(path: str | None, processes: int) -> None:
    """Says where VisGym lies and over how many children this process spreads its environments.

    Apart from the environments' settings, because it says nothing about their tasks. Environments made later obey.

    Args:
        path: folder of the fork; None: what ``CLEW_VISGYM`` names.
    """
    fork.configured, pool.processes = path, processes


def make_visgym(env_id: str, **settings: object) -> VisGymEnv:
    """The environment of an id like ``visgym:maze_2d/easy`` (see ``VisGymEnv`` for the settings and errors)."""
    task = env_id.removeprefix(PREFIX)
    kind = VisGymMaze if task.startswith("maze_2d/") else VisGymEnv
    return kind(task, **settings)  # type: ignore[arg-type]  # what is wrong with them is found there
