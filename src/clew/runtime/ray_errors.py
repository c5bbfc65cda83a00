"""What Ray says of a worker that died or failed, as a user needs it."""

from __future__ import annotations

from ray.exceptions import RayActorError, RayError, RayTaskError


def cause_of(error: RayError) -> Exception:
    """What a worker died of or raised, without Ray's wrapping.

    Not every death is a ``RayActorError``: a process that Ray ends because its machine runs out of memory is an
    ``OutOfMemoryError``, what lay on a machine that went down an ``ObjectLostError``.
    """
    return error.cause if isinstance(error, RayTaskError) else error


def describe(error: Exception) -> str:
    """What a worker died of, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    # Of an actor whose making failed, Ray gives the whole traceback: what was raised comes last.
    line = lines[-1] if "creation task" in lines[0] else lines[0]
    return line if isinstance(error, RayActorError) else f"{type(error).__name__}: {line}"
