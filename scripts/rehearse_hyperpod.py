"""Follows docs/hyperpod.md without AWS: runs what needs none, as it stands there, and checks what comes of it.

`make rehearse`. Blocks marked `sh rehearse` are run, after those marked `sh values`. Those marked `sh aws` are not,
but the `clew` calls in them must be possible. The exit code is 1 if anything fails.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from docs_commands import blocks, calls_of, fault

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/hyperpod.md"
sys.path.insert(0, str(ROOT / "tests"))  # the schemas' checks and the local S3 server are the tests' own


class Skipped(Exception):
    """Something that this machine lacks; the message names it."""


@dataclass
class Rehearsal:
    """What was done in a folder, and how it ended: (step, what, verdict, seconds)."""

    place: Path
    rows: list[tuple[str, str, str, float]] = field(default_factory=list)

    def note(self, step: str, what: str, action: Callable[[], str]) -> None:
        """Runs an action and notes its verdict down; a failure doesn't end the rehearsal."""
        began = time.monotonic()
        try:
            verdict = action()
        except Skipped as missing:
            verdict = f"not checked: {missing}"
        except Exception as error:
            verdict = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        self.rows.append((step, what, verdict, time.monotonic() - began))
        print(f"{self.rows[-1][3]:7.1f}  {step:36}  {what:42}  {verdict}", flush=True)

    @property
    def failed(self) -> bool:
        return any(verdict.startswith("FAILED") for _, _, verdict, _ in self.rows)


def follow(rehearsal: Rehearsal) -> None:
    """The page, top to bottom."""
    tools = rehearsal.place / "bin"
    tools.mkdir()
    (tools / "clew").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m clew.cli "$@"\n')
    (tools / "clew").chmod(0o755)
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": path, "COLUMNS": "120"}
    values = ""

    def run(text: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", values + text],
            cwd=rehearsal.place,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-300:]}")
        missing = [
            line.strip("# ") for line in done.stdout.splitlines() if line.startswith(("to be set", "# not valid"))
        ]
        return "ok" + (f" ({'; '.join(': '.join(line.split(': ')[:2]) for line in missing)})" if missing else "")

    for block in blocks(PAGE):
        if not block.kind:
            continue
        lines = [line for line in block.text.splitlines() if line.strip() and not line.startswith("#")]
        if block.kind == "sh values":
            values += block.text
        elif block.kind == "sh rehearse":
            for line in lines:
                rehearsal.note(block.heading, _short(line), lambda line=line: run(line))
        else:
            rehearsal.note(block.heading, _short(lines[0]), lambda block=block: possible(block.text))


def possible(text: str) -> str:
    """Checks lines that are not run: bash can read them, and their `clew` calls exist."""
    subprocess.run(["bash", "-n", "-c", text], check=True, capture_output=True)
    found = [call for line in text.splitlines() for call in calls_of(line)]
    if wrong := [text for call in found if (text := fault(call)) is not None]:
        raise ValueError("; ".join(wrong))
    return f"not run{f' (possible calls of clew: {len(found)})' if found else ''}"


def check_kubernetes(folder: Path) -> str:
    """Every manifest against Kubernetes' schemas."""
    _needs("kubernetes_validate", "jsonschema")
    from manifests import check

    made = _manifests(folder)
    for manifest in made.values():
        check(manifest)
    return f"ok ({len(made)} manifests)"


def check_kuberay(folder: Path) -> str:
    """RayCluster, RayJob and RayService against KubeRay's."""
    _needs("kubernetes_validate", "jsonschema")
    from manifests import CRDS, kuberay_schema

    ray = [manifest for manifest in _manifests(folder).values() if manifest["apiVersion"] == "ray.io/v1"]
    for manifest in ray:
        if (schema := kuberay_schema(manifest["kind"])) is None:
            raise Skipped(f"KubeRay's schemas are not in {CRDS} (CLEW_KUBERAY_CRDS names their folder)")
        schema.validate(manifest)
    return f"ok ({', '.join(manifest['kind'] for manifest in ray)})"


def check_nothing_unset(folder: Path) -> str:
    """Once all values are given, no file holds one that is still to be set."""
    if unset := [path.name for path in folder.rglob("*") if path.is_file() and "SET-" in path.read_text()]:
        raise ValueError(f"values are still to be set in {', '.join(unset)}")
    return "ok"


def check_script(script: Path) -> str:
    """bash can read it, and it refuses to start without an account."""
    subprocess.run(["bash", "-n", script], check=True)
    done = subprocess.run([script], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    if done.returncode == 0 or "AWS_REGION" not in done.stderr:
        raise ValueError(f"without AWS_REGION it ended with {done.returncode}: {done.stderr[-200:]}")
    return "ok"


def check_alerts(folder: Path) -> str:
    """Prometheus' own tool on its configuration and the alert rules."""
    if (promtool := shutil.which("promtool")) is None:
        raise Skipped("promtool is not installed")
    for kind, file in (("rules", "clew.rules.yml"), ("config", "prometheus.yml")):
        done = subprocess.run([promtool, "check", kind, folder / file], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(done.stderr[-300:] + done.stdout[-300:])
    return "ok"


def publish_and_fetch(place: Path) -> str:
    """An adapter of the shipped model, exported to a local S3 server by `clew export`, and back."""
    _needs("moto", "boto3", "pytest")
    from s3_server import BUCKET, account, boto3, s3_server

    with s3_server() as url, _environment(account(url)):
        import torch

        from clew.checkpoint import write_directory
        from clew.cli.main import run
        from clew.policy.adapter import attach_lora, current_adapter, read_adapter, write_adapter
        from clew.policy.model import load_model
        from clew.policy.paths import resolve_model_path
        from clew.recipe import load_recipe
        from clew.serving.store import open_store

        recipe = load_recipe("laptop", [])
        torch.set_num_threads(1)
        policy = attach_lora(load_model(resolve_model_path(recipe.model)), 4, 8, 0.0)
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_B" in name:
                    parameter.add_(0.01)
        adapter = current_adapter(policy, 1)
        write_directory(place / "adapters/step-000001", lambda staging: write_adapter(adapter, staging), {})
        (place / "recipe.toml").write_text(recipe.to_toml())
        boto3.session.Session().client("s3").create_bucket(Bucket=BUCKET)
        for _ in range(2):  # publishing twice is no harm
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                code = run(["export", str(place), "--step", "1", "--to", f"s3://{BUCKET}/maze"])
            if code:
                raise RuntimeError(f"clew export ended with {code}")
        store = open_store(f"s3://{BUCKET}/maze", place / "cache")
        (name,) = store.names()
        if read_adapter(store.fetch(name)).content_hash != adapter.content_hash:
            raise ValueError("what came back is another adapter")
        return f"ok ({name})"


def _manifests(folder: Path) -> dict[str, dict]:
    import yaml

    return {path.name: yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml"))}


def _needs(*modules: str) -> None:
    if missing := [module for module in modules if find_spec(module) is None]:
        raise Skipped(f"{', '.join(missing)} not installed")


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _short(line: str) -> str:
    return line if len(line) <= 40 else f"{line[:37].rstrip()}..."


def main() -> int:
    """Follows the page, checks what it made, and prints a row for each."""
    print(f"seconds  {'step':34}  {'what':40}  verdict")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="clew-rehearsal-") as folder:
        place = Path(folder)
        rehearsal = Rehearsal(place)
        follow(rehearsal)
        for step, what, action in (
            ("manifests", "Kubernetes' schemas", lambda: check_kubernetes(place / "cluster")),
            ("manifests", "KubeRay's schemas", lambda: check_kuberay(place / "cluster")),
            ("manifests", "every value is set", lambda: check_nothing_unset(place / "cluster")),
            ("image", "build.sh", lambda: check_script(place / "cluster/image/build.sh")),
            ("dashboards", "promtool", lambda: check_alerts(place / "watch/prometheus")),
            ("adapter", "published to a local S3 server, and fetched", lambda: publish_and_fetch(place / "run")),
        ):
            rehearsal.note(step, what, action)
    verdicts = [verdict.split(":")[0].split(" (")[0] for _, _, verdict, _ in rehearsal.rows]
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in ("ok", "FAILED", "not checked", "not run"))
    print(f"{time.monotonic() - began:.0f} s: {counts} (needs AWS)")
    return int(rehearsal.failed)


if __name__ == "__main__":
    sys.exit(main())
