"""How many steps a second VisGym's maze plays through its child processes (the target is 500, with 2 on 2 cores).

    CLEW_VISGYM=/path/to/VisGym OMP_NUM_THREADS=1 python benchmarks/visgym_speed.py [--seconds 5]

A step is a parsed answer, VisGym's own step and its frame (225 x 225 x 3 bytes through a pipe). Many episodes are
played at once: from one thread, as the rollout loop does, and from as many threads as there are processes.
"""

from __future__ import annotations

import argparse
import threading
import time

from clew.envs.visgym import VisGymMaze

TARGET = 500
EPISODES = 32


def rate(envs: list[VisGymMaze], threads: int, seconds: float) -> float:
    """Steps a second of all environments, shared out among threads."""
    steps = [0] * threads
    until = time.perf_counter() + seconds

    def play(share: int) -> None:
        while time.perf_counter() < until:
            for env in envs[share::threads]:
                env.step(env.move_text(steps[share] % 4))
                steps[share] += 1

    began = time.perf_counter()
    workers = [threading.Thread(target=play, args=(share,)) for share in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(steps) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds a measurement")
    seconds = parser.parse_args().seconds
    print(f"{EPISODES} episodes of visgym:maze_2d/easy at once")
    for children, threads in ((1, 1), (2, 1), (2, 2)):
        envs = [VisGymMaze("maze_2d/easy", max_turns=10**9, children=children) for _ in range(EPISODES)]
        for seed, env in enumerate(envs):
            env.reset(seed)
        rate(envs, threads, seconds / 10)  # warm-up
        found = rate(envs, threads, seconds)
        verdict = "reached" if found >= TARGET else "MISSED"
        print(f"{children} processes, {threads} threads: {found:8,.0f} steps a second   {verdict} (target {TARGET})")
        for env in envs:
            env.close()


if __name__ == "__main__":
    main()
