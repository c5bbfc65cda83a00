"""The commands. Each imports what it needs when it runs, so that ``clew --help`` is quick."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from clew import __version__

app = typer.Typer(
    help="Trains vision-language agents by reinforcement learning on tasks they see.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cluster = typer.Typer(help="Plan a cluster, make what puts a run on it, and watch it.", no_args_is_help=True)
app.add_typer(cluster, name="cluster")


@dataclass
class Place:
    """Where the command that is running keeps its files: the traceback of a fault goes there."""

    run_dir: Path | None = None


place = Place()

RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="A recipe shipped with Clew (gpu, hyperpod, laptop, visgym), or a TOML file."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Changes of the recipe, e.g. training.steps=50."),
]

Address = Annotated[
    str,
    typer.Option("--address", help="http://HOST:8265, https://HOST, or sagemaker_ray://CLUSTER/NAMESPACE."),
]
JobId = Annotated[
    str | None, typer.Argument(metavar="[ID]", help="Id of the job; may be left out where one of Clew's is live.")
]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"clew {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


@app.command()
def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    run: Annotated[Path | None, typer.Option("--run", help="Run directory; runs/RECIPE-seedN if not given.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start again; a run that is there is renamed, not deleted.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With runtime.kind=skyrl: print the options SkyRL would get, and stop.")
    ] = False,
) -> None:
    """Train by reinforcement learning; goes on with an unfinished run."""
    from rich.console import Console

    from clew.recipe import load_recipe
    from clew.runtime.launch import launch, show_options
    from clew.runtime.run_directory import default_run_dir

    loaded = load_recipe(recipe, overrides or ())
    run_dir = run or default_run_dir(loaded)
    if dry_run:
        show_options(loaded, run_dir, Console())
        return
    place.run_dir = run_dir
    launch(loaded, run_dir, fresh, Console())


@app.command("eval")
def evaluate(
    overrides: Overrides = None,
    run: Annotated[Path | None, typer.Option("--run", help="Evaluate the best adapter of this run.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Evaluate this model folder, under the settings of the laptop recipe."),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="A PEFT adapter folder on top of the model.")
    ] = None,
    suite: Annotated[
        str | None, typer.Option("--suite", help="Play this suite only; all of the recipe's if not given.")
    ] = None,
    policy: Annotated[str, typer.Option("--policy", help="model, oracle, random or no-turn-back.")] = "model",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results, episode by episode, to this file.")
    ] = None,
) -> None:
    """Play fixed suites of tasks and count what is solved."""
    from clew.cli.evaluate import run_eval

    place.run_dir = run
    run_eval(overrides or [], run, model, adapter, suite, policy, json_file)


@app.command()
def play(
    model: Annotated[str, typer.Option("--model", help="As the server names it: BASE or BASE:ADAPTER.")],
    recipe: Annotated[
        str,
        typer.Argument(metavar="[RECIPE]", help="Whose suites and settings are played: a shipped recipe, a TOML file."),
    ] = "laptop",
    overrides: Overrides = None,
    url: Annotated[str, typer.Option("--url", help="The server.")] = "http://127.0.0.1:8000",
    suite: Annotated[
        str | None, typer.Option("--suite", help="The suite to play; the recipe's first if not given.")
    ] = None,
    sampled: Annotated[
        bool, typer.Option("--sampled", help="Draw answers at the recipe's temperature; the likeliest if not given.")
    ] = False,
    step: Annotated[
        int, typer.Option("--step", min=0, help="With --sampled: the step whose evaluation's draws are repeated.")
    ] = 0,
    compare: Annotated[
        Path | None, typer.Option("--compare", help="Hold it against this file of a run: eval/step-*/SUITE.MODE.json.")
    ] = None,
    gifs: Annotated[Path | None, typer.Option("--gifs", help="Write a few episodes to this folder.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result, episode by episode, to this file.")
    ] = None,
    clients: Annotated[int, typer.Option("--clients", min=1, max=256, help="Requests on their way at a time.")] = 8,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="File that holds the API key; CLEW_API_KEY if not given.")
    ] = None,
) -> None:
    """Play a suite with a model that a server offers, and count what is solved."""
    from clew.cli.play import Asked, run_play

    run_play(
        recipe,
        overrides or [],
        Asked(url, model, suite, "sampled" if sampled else "greedy", step, clients, api_key_file),
        compare,
        gifs,
        json_file,
    )


@app.command()
def prepare(
    recipe: RecipeName,
    overrides: Overrides = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", help="Folder to write to; runtime.shared_dir, or ./prepared, if not given."),
    ] = None,
) -> None:
    """Make ready what a run's first start needs: the model of a hub, checked, and the lists of tasks."""
    from rich.console import Console

    from clew.recipe import load_recipe
    from clew.runtime.prepare import prepare as make_ready
    from clew.runtime.prepare import prepared_dir

    loaded = load_recipe(recipe, overrides or ())
    place.run_dir = to or prepared_dir(loaded)
    make_ready(loaded, to, Console(), [recipe, *(overrides or [])])


@app.command()
def sft(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Model folder to write; runs/RECIPE-sft-seedN if not given.")
    ] = None,
) -> None:
    """Make the warm start from nothing, by imitation."""
    from rich.console import Console

    from clew.recipe import load_recipe
    from clew.runtime.imitation import run_sft, work_folder
    from clew.runtime.run_directory import file_name

    loaded = load_recipe(recipe, overrides or ())
    folder = out or Path("runs") / f"{file_name(loaded)}-sft-seed{loaded.sft.seed}"
    place.run_dir = work_folder(folder)
    run_sft(loaded, folder, Console(), shlex.join(["clew", "sft", recipe, *(overrides or [])]))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    to: Annotated[
        str, typer.Option("--to", metavar="DIR|s3://BUCKET/PREFIX", help="Folder to write, or where to publish.")
    ],
    step: Annotated[str, typer.Option("--step", help="best, or the number of a step.")] = "best",
) -> None:
    """Copy an adapter out of a run, ready to serve, or publish it in S3 under a name of its own."""
    from clew.cli.export import run_export

    place.run_dir = run
    run_export(run, step, to)


@app.command()
def serve(
    model: Annotated[str, typer.Option("--model", help="Model folder, or package:warm-start.")],
    adapters: Annotated[
        str | None, typer.Option("--adapters", help="Folder of adapters, a run, or s3://bucket/prefix.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="The model's name in requests; its folder's if not given.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8000,
    max_adapters: Annotated[int, typer.Option("--max-adapters", min=1, help="Adapters loaded at once.")] = 4,
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", help="Key that requests must carry; also from CLEW_API_KEY."),
    ] = None,
    engine: Annotated[
        str, typer.Option("--engine", help="transformers, vllm, or auto: vllm where it is installed with a GPU.")
    ] = "auto",
    recipe: Annotated[
        str, typer.Option("--recipe", help="Whose mazes the page at /watch shows: a shipped recipe, a TOML file.")
    ] = "laptop",
) -> None:
    """Serve a model and its adapters behind an OpenAI-compatible API."""
    from rich.console import Console

    from clew.cli.serve import run_serve

    run_serve(model, adapters, name, host, port, max_adapters, api_key_file, engine, recipe, Console())


@app.command()
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]) -> None:
    """Write report.html of a run, finished or not."""
    from clew.report.html import write_report

    place.run_dir = run
    print(f"report: {write_report(run)}")


@app.command()
def doctor(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="A recipe whose environment is looked for too.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Show versions, cores, memory and disk, and say what is missing."""
    from clew.cli.doctor import show
    from clew.recipe import load_recipe

    if not show(load_recipe(recipe, overrides or ()) if recipe else None):
        raise typer.Exit(1)


@app.command()
def submit(
    recipe: RecipeName,
    address: Address,
    overrides: Overrides = None,
    run: Annotated[
        str | None,
        typer.Option("--run", help="Run directory there; runtime.shared_dir/runs/RECIPE-seedN if not given."),
    ] = None,
    retry: Annotated[
        int, typer.Option("--retry", min=0, help="How often to submit again when driver or machines are lost.")
    ] = 0,
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Show its log until it ends; else only submit.")
    ] = True,
) -> None:
    """Train on a Ray cluster as a job; follows the job of the run if there is one."""
    from clew.cli.submit import submit as submit_run

    submit_run(recipe, overrides or [], address, run, retry, follow)


@app.command()
def status(address: Address, job: JobId = None) -> None:
    """Show the jobs on a cluster, or all about one."""
    from clew.cli.submit import status as show_status

    show_status(job, address)


@app.command()
def logs(
    address: Address,
    job: JobId = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the job ends.")] = False,
) -> None:
    """Show the log of a job."""
    from clew.cli.submit import logs as show_logs

    show_logs(job, address, follow)


@app.command()
def stop(address: Address, job: JobId = None) -> None:
    """Stop a job; the run is saved first, and `clew submit` goes on with it."""
    from clew.cli.submit import stop as stop_job

    stop_job(job, address)


@cluster.command("plan")
def cluster_plan(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Show who runs where and the memory each device needs; refuse what cannot fit or divide."""
    from rich.console import Console

    from clew.cli.cluster import show_plan
    from clew.recipe import load_recipe

    show_plan(load_recipe(recipe, overrides or ()), Console())


@cluster.command("render")
def cluster_render(
    recipe: RecipeName,
    to: Annotated[Path, typer.Option("--to", help="Folder to write to: new, or rendered before.")],
    overrides: Overrides = None,
    image: Annotated[
        str | None, typer.Option("--image", help="Container image, as image/build.sh prints it; sets cluster.image.")
    ] = None,
) -> None:
    """Write image and Kubernetes manifests that put a run on HyperPod's EKS."""
    from clew.cloud.render import render
    from clew.recipe import load_recipe

    changes = overrides or []
    chosen = [f"cluster.image={image}"] if image is not None else []
    unset = render(load_recipe(recipe, [*changes, *chosen]), to, [recipe, *changes])
    for key, meaning in unset.items():
        print(f"to be set: {key}: {meaning}")
    print(f"rendered: {to / 'README.md'} says what is where and what comes first")


@cluster.command("dashboards")
def cluster_dashboards(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write to; made if it is not there.")],
) -> None:
    """Write Grafana dashboards, their provisioning files, and Prometheus's configuration with alert rules."""
    from clew.observe.files import write_dashboards

    for path in write_dashboards(folder):
        print(path)
