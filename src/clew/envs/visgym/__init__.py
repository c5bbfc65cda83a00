"""VisGym's tasks, each in a process apart from the Gymnasium that is installed here."""

from clew.envs.visgym.env import PREFIX, VisGymEnv, VisGymMaze

__all__ = ["PREFIX", "VisGymEnv", "VisGymMaze", "make_visgym"]


def make_visgym(env_id: str, **settings: object) -> VisGymEnv:
    """The environment of an id like ``visgym:maze_2d/easy`` (see ``VisGymEnv`` for the settings and errors)."""
    task = env_id.removeprefix(PREFIX)
    kind = VisGymMaze if task.startswith("maze_2d/") else VisGymEnv
    return kind(task, **settings)  # type: ignore[arg-type]  # what is wrong with them is found there
