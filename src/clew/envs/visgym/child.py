"""The child process in which VisGym lives: plays its environments for a parent that speaks JSON lines.

VisGym is a fork of Gymnasium that is imported as ``gymnasium``, so it can't share a process with the real one. This
file is run as a script, with the fork first on ``sys.path``; it imports nothing of Clew.

A request is one line on standard input: ``{"do": "make" | "reset" | "step" | "solve" | "close", "env": number, ...}``.
The answer is one line of JSON on what was standard output when the process started; where it holds ``"frame": [height,
width, 3]`` the raw uint8 bytes of that frame follow the line. ``"error"`` says what VisGym raised. Whatever VisGym
itself prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from typing import Any, BinaryIO


def main(fork: str) -> None:
    """Serves requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # some environments print
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    sys.path.insert(0, fork)
    try:
        import gymnasium
    except Exception as error:
        _send(answers, {"error": f"{type(error).__name__}: {error}"}, None)
        return
    if not hasattr(gymnasium, "VLMEnvMixin"):
        _send(answers, {"error": f"{gymnasium.__file__} is not VisGym's fork of Gymnasium"}, None)
        return
    _send(answers, {"fork": os.path.dirname(os.path.dirname(os.path.abspath(gymnasium.__file__)))}, None)
    envs: dict[int, Any] = {}
    for line in sys.stdin.buffer:
        try:
            reply, frame = _serve(gymnasium, envs, json.loads(line))
        except Exception as error:
            reply, frame = {"error": f"{type(error).__name__}: {error}"}, None
        _send(answers, reply, frame)


def _serve(gymnasium: Any, envs: dict[int, Any], request: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    kind, number = request["do"], request["env"]
    if kind == "make":
        # Without its wrappers: they would add a time limit and checks of their own.
        env = envs[number] = gymnasium.make(request["id"]).unwrapped
        return {"functions": list(env.action_space.get_function_names())}, None
    if kind == "close":
        with contextlib.suppress(KeyError):
            envs.pop(number).close()
        return {}, None
    env = envs[number]
    if kind == "reset":
        if request.get("state") is None:
            env.reset(seed=request["seed"])
        else:
            env.reset(seed=request["seed"], init_state=request["state"])
        # Drawn again: what maze_2d returns from a second reset still shows the walls of the episode before.
        frame = _picture(env, env.render())
        state = _state(env)
        # What makes two seeds the same problem; the first frame where a task can't say it in JSON.
        content = frame.tobytes() if state is None else json.dumps(state, sort_keys=True).encode()
        facts = {"prompt": env.get_prompt(), "state": state, "content": hashlib.sha256(content).hexdigest()}
        return facts, _picture(env, frame)
    if kind == "step":
        frame, reward, terminated, truncated, info = env.step(request["action"])
        feedback = info.get("env_feedback", getattr(env, "env_feedback", None))
        reply = {
            "reward": float(reward),
            "terminated": bool(terminated),
            "truncated": bool(truncated),
            "feedback": str(feedback or ""),
        }
        if "agent" in info:  # where the walker of a maze is
            reply["agent"] = [int(number) for number in info["agent"]]
        return reply, _picture(env, frame)
    if kind == "solve":
        return {"actions": [str(action) for action in env.solve()]}, None
    raise ValueError(f"no such request: {kind}")


def _picture(env: Any, frame: Any) -> Any:
    """The observation where it is a picture, else what the environment draws (sliding_block observes numbers)."""
    return frame if getattr(frame, "ndim", 0) == 3 else env.render()


def _state(env: Any) -> Any:
    """What recreates the task, as JSON can say it; None where it can't."""
    if not hasattr(env, "get_init_state"):
        return None
    try:
        return json.loads(json.dumps(env.get_init_state(), default=lambda value: value.tolist()))
    except (TypeError, ValueError, AttributeError):
        return None


def _send(answers: BinaryIO, reply: dict[str, Any], frame: Any) -> None:
    pixels = b""
    if frame is not None:
        if str(frame.dtype) != "uint8" or frame.ndim != 3 or frame.shape[2] != 3:
            reply = {"error": f"a frame is {frame.dtype} of shape {frame.shape}, not uint8 [height, width, 3]"}
        else:
            reply, pixels = {**reply, "frame": list(frame.shape)}, frame.tobytes()
    answers.write(json.dumps(reply).encode() + b"\n" + pixels)
    answers.flush()


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except (BrokenPipeError, KeyboardInterrupt):  # the parent is gone, or wants no more
        os._exit(0)  # without a word, that of a flush at the end included
