"""The server under load, under bad requests, and while it loads adapters.

    python benchmarks/serving.py --adapters runs/laptop-seed0 [--bad 10000]

Starts a real `clew serve` with the shipped model and the adapters of a run (at least five), and measures

- requests/s and latency at 1, 8 and 32 clients, each with a maze's first frame and up to 16 tokens at temperature 1,
  base and two adapters in turn;
- latency of requests for loaded adapters while others are being loaded and evicted all the time, beside the same
  without any loading;
- with --bad N: what N bad requests (bad_requests.py) are answered with, a good one after every 25 that must be
  answered as ever, and the memory of the server's processes before and after. Exit code 1 if one was answered with
  other than 4xx or a closed connection.
"""

from __future__ import annotations

import argparse
import base64
import collections
import contextlib
import http.client
import io
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bad_requests
import raw_requests
from PIL import Image

from clew.envs.registry import make_env
from clew.evaluation.suites import environment_settings
from clew.recipe import load_recipe

PORT = re.compile(r"http://127\.0\.0\.1:(\d+)/v1")
FORBIDDEN = re.compile(r"HANG|[1235]\d\d")


@contextlib.contextmanager
def server(adapters: Path, max_adapters: int) -> Iterator[tuple[int, int]]:
    """A running `clew serve`: its port and process id."""
    command = [sys.executable, "-m", "clew.cli", "serve", "--model", "package:warm-start", "--adapters", str(adapters)]
    command += ["--port", "0", "--max-adapters", str(max_adapters)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        match = next((found for line in process.stdout if (found := PORT.search(line))), None)
        if match is None:
            raise SystemExit(f"clew serve ended with code {process.wait()}")
        yield int(match[1]), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def processes(root: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for process in found:
        found += parents.get(process, [])
    return found


def memory_mib(root: int) -> dict[str, float]:
    """Resident memory of the server's processes that do the work, MiB by name."""
    sizes: dict[str, float] = {}
    for process in processes(root):
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
            if name.startswith("ray::") and not name.startswith("ray::IDLE"):
                sizes[name] = sizes.get(name, 0.0) + pages * os.sysconf("SC_PAGESIZE") / 2**20
    return sizes


def maze_body(seed: int) -> dict[str, Any]:
    """What an agent asks on a maze's first frame."""
    recipe = load_recipe("laptop")
    env = make_env(recipe.environment.id, **environment_settings(recipe))
    observation, _ = env.reset(seed)
    out = io.BytesIO()
    Image.fromarray(observation.image).save(out, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    text = f"{env.prompt}\n{observation.text}" if observation.text else env.prompt
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 16, "temperature": 1.0}


class Client:
    """One connection, kept alive."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def ask(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and answer."""
        data = json.dumps(body).encode()
        self.connection.request("POST", raw_requests.CHAT, data, {"Content-Type": "application/json"})
        answer = self.connection.getresponse()
        return answer.status, json.loads(answer.read())


def run_clients(port: int, n: int, bodies: list[dict[str, Any]], stop: Callable[[int], bool]) -> list[float]:
    """Latencies in seconds of what ``n`` clients ask one after the other, until ``stop(requests so far)``."""
    latencies: list[float] = []

    def work(client_number: int) -> None:
        client = Client(port)
        for body in itertools.islice(itertools.cycle(bodies), client_number, None):
            if stop(len(latencies)):
                return
            began = time.perf_counter()
            status, answer = client.ask(body)
            if status != 200:
                raise SystemExit(f"a good request was answered with {status}: {answer}")
            latencies.append(time.perf_counter() - began)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return latencies


def ms(latencies: list[float], quantile: float) -> float:
    """A quantile in milliseconds; 1.0 is the largest."""
    return 1e3 * sorted(latencies)[min(len(latencies) - 1, int(quantile * len(latencies)))]


def speed(port: int, models: list[str], requests: int) -> None:
    """Prints requests/s and latency by number of clients."""
    bodies = [{**maze_body(i), "model": models[i % len(models)]} for i in range(30)]
    run_clients(port, 4, bodies, lambda done: done >= 40)  # warm, adapters loaded
    print(
        f"\n| clients | requests/s | p50 ms | p95 ms | slowest ms |  ({', '.join(models)})\n|---:|---:|---:|---:|---:|"
    )
    for n in (1, 8, 32):
        began = time.perf_counter()
        latencies = run_clients(port, n, bodies, lambda done: done >= requests)
        rate = len(latencies) / (time.perf_counter() - began)
        print(f"| {n} | {rate:.1f} | {ms(latencies, 0.5):.0f} | {ms(latencies, 0.95):.0f} | {ms(latencies, 1):.0f} |")


def loading(port: int, base: str, adapters: list[str], seconds: float) -> None:
    """Prints latencies of requests for the base model with and without adapters being loaded beside them.

    The two take turns, five times each: what else the machine does meets both. Of the slowest request of each turn, the
    median is printed too.
    """
    bodies = [{**maze_body(i), "model": base} for i in range(8)]
    client, names = Client(port), itertools.cycle(adapters)  # more than are kept: each is loaded anew
    latencies: dict[bool, list[list[float]]] = {False: [], True: []}
    first_tokens: list[float] = []

    def load(done: threading.Event) -> None:
        while not done.is_set():
            began = time.perf_counter()
            client.ask({**bodies[0], "model": f"{base}:{next(names)}", "max_tokens": 1})
            first_tokens.append(time.perf_counter() - began)

    for beside in (False, True) * 5:
        done = threading.Event()
        loader = threading.Thread(target=load, args=(done,))
        until = time.monotonic() + seconds / 5
        if beside:
            loader.start()
        latencies[beside].append(run_clients(port, 4, bodies, lambda _, until=until: time.monotonic() > until))
        done.set()
        if beside:
            loader.join()
    print(f"\nrequests for a loaded model by 4 clients, 5 x {seconds / 5:.0f} s each, in turn:")
    print("| adapters loaded meanwhile | requests | p50 ms | p99 ms | slowest of a turn, median ms | slowest ms |")
    print("|---:|---:|---:|---:|---:|---:|")
    for beside, turns in latencies.items():
        whole = list(itertools.chain(*turns))
        slowest = statistics.median(ms(turn, 1) for turn in turns)
        figures = [ms(whole, 0.5), ms(whole, 0.99), slowest, ms(whole, 1)]
        count = len(first_tokens) if beside else 0
        print(f"| {count} | {len(whole)} | {' | '.join(f'{figure:.0f}' for figure in figures)} |")
    print(f"(an adapter that has to be loaded: first token after {1e3 * statistics.median(first_tokens):.0f} ms)")


def bad(port: int, pid: int, base: str, n: int, seed: int, threads: int) -> bool:
    """Sends bad requests; prints what they were answered with; returns whether all is well."""
    good = {**maze_body(0), "model": base, "temperature": 0, "logprobs": True}
    reference = _text(Client(port).ask(good))
    stream = iter(bad_requests.Stream(base, seed))
    lock = threading.Lock()
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    wrong: list[str] = []
    sent = 0

    def work() -> None:
        nonlocal sent
        while True:
            with lock:
                if sent >= n:
                    return
                sent += 1
                number, request = sent, next(stream)
            try:
                outcome = raw_requests.send("127.0.0.1", port, request)
            except TimeoutError:
                outcome = "HANG"
            with lock:
                counts[request.kind][outcome] += 1
                if FORBIDDEN.fullmatch(outcome):
                    wrong.append(f"{request.kind} -> {outcome}: {request.parts[0][:100]!r}")
            if number % 25 == 0:
                answer = _text(Client(port).ask(good))
                with lock:
                    counts["(a good one)"]["same answer" if answer == reference else "OTHER ANSWER"] += 1
                    if answer != reference:
                        wrong.append(f"good request {number}: {answer}")

    before = memory_mib(pid)
    began = time.perf_counter()
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"\n{n} bad requests in {time.perf_counter() - began:.0f} s, {threads} at a time (seed {seed}):")
    print("| kind | answered with |\n|---|---|")
    for kind, outcomes in sorted(counts.items()):
        print(f"| {kind} | {', '.join(f'{outcome}: {count}' for outcome, count in sorted(outcomes.items()))} |")
    after = memory_mib(pid)
    print("\nmemory, MiB: " + ", ".join(f"{name} {before[name]:.0f} -> {after.get(name, 0):.0f}" for name in before))
    for line in wrong[:20]:
        print(f"WRONG: {line}")
    return not wrong


def _text(outcome: tuple[int, dict[str, Any]]) -> str:
    status, answer = outcome
    return answer["choices"][0]["message"]["content"] if status == 200 else f"{status}: {answer}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=Path, required=True, help="a run, or a folder of adapters")
    parser.add_argument("--requests", type=int, default=200, help="for each number of clients")
    parser.add_argument("--seconds", type=float, default=15, help="of each half of the measurement while loading")
    parser.add_argument("--bad", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0, help="of the bad requests")
    parser.add_argument("--threads", type=int, default=8, help="senders of bad requests")
    options = parser.parse_args()
    max_adapters = 4
    with server(options.adapters, max_adapters) as (port, pid):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/v1/models")
        names = [model["id"] for model in json.loads(connection.getresponse().read())["data"]]
        base, adapters = names[0], [name.partition(":")[2] for name in names[1:]]
        if len(adapters) <= max_adapters:
            raise SystemExit(
                f"--adapters {options.adapters} has {len(adapters)} adapters; {max_adapters + 1} are needed"
            )
        if options.requests:
            speed(port, [base, *(f"{base}:{name}" for name in adapters[-2:])], options.requests)
        if options.seconds:
            loading(port, base, adapters, options.seconds)
        return 0 if not options.bad or bad(port, pid, base, options.bad, options.seed, options.threads) else 1


if __name__ == "__main__":
    sys.exit(main())
