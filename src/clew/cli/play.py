"""``clew play``: a suite played with a model that a server offers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

from clew.agent.ledger import StopReason
from clew.checkpoint import write_file_atomic
from clew.cli.evaluate import refuse_unwritable, results_table
from clew.console import say
from clew.envs.suites import file_stem
from clew.errors import UserError
from clew.evaluation.evaluate import Result
from clew.evaluation.evaluator import play_suite
from clew.evaluation.suites import RecipeSuites
from clew.recipe import load_recipe
from clew.report.walks import write_gifs
from clew.runtime.process import configure_environments
from clew.serving.client import ChatClient, Refused
from clew.serving.keys import read_api_key
from clew.serving.play import Comparison, check_model, compare, read_record, stop_reasons, unknown_model
from clew.serving.remote import RemoteRollouts

_SHOWN_DIFFERENCES = 10


@dataclass(frozen=True)
class Asked:
    """What is to be played where (see the options of ``clew play``)."""

    url: str
    model: str
    suite: str | None
    mode: str
    step: int
    clients: int
    api_key_file: Path | None


def run_play(
    recipe_name: str,
    overrides: list[str],
    asked: Asked,
    compare_with: Path | None,
    gifs: Path | None,
    json_file: Path | None,
) -> None:
    """Plays a suite and prints what came of it; exits with code 1 if the server was lost or a comparison failed.

    Raises:
        UserError: a server, model, key, suite or file is not what it should be.
    """
    if "=" in recipe_name:  # a change of the default recipe
        recipe_name, overrides = "laptop", [recipe_name, *overrides]
    recipe = load_recipe(recipe_name, overrides)
    if json_file is not None:
        refuse_unwritable(json_file)
    if gifs is not None:
        refuse_unwritable(gifs / "episode.gif", "--gifs")
    name = asked.suite or recipe.evaluation.suites[0]
    client = ChatClient(asked.url, read_api_key(asked.api_key_file))
    console = Console()
    try:
        check_model(client, asked.model)
        configure_environments(recipe)
        suite = RecipeSuites(recipe).suite(name)
        recorded = read_record(compare_with, suite, asked.mode) if compare_with is not None else None
        task = f"{asked.model} plays the {len(suite.tasks)} tasks of {name}"
        if not console.is_terminal:
            say(console, task)
        with console.status(task):
            rollouts = RemoteRollouts(client, asked.model, asked.clients)
            result = play_suite(recipe, rollouts, suite, asked.mode, asked.step)
    except Refused as error:
        if error.status in (401, 403):
            raise
        if error.code == "model_not_found":
            raise unknown_model(client, asked.model) from error
        raise UserError(f"--model {asked.model}: {error}") from error
    finally:
        client.close()
    console.print(results_table([result]))
    reasons = stop_reasons(result.episodes)
    console.print("episodes ended by: " + ", ".join(f"{reason} {n}" for reason, n in reasons.items()), highlight=False)
    if json_file is not None:
        content = {"model": asked.model, "url": client.url, **result.record()}
        write_file_atomic(json_file, json.dumps(content, indent=1) + "\n")
    if gifs is not None:
        for path in write_gifs(gifs, asked.model, file_stem(name), result.trajectories):
            say(console, f"gif: {path}")
    if recorded is not None:
        _show(compare(result, recorded), compare_with, console)
    _check_infrastructure(result, console)


def _show(found: Comparison, path: Path | None, console: Console) -> None:
    of = f" (of the {found.recorded} in it)" if found.recorded != found.total else ""
    say(console, f"{found.same} of {found.total} episodes the same as in {path}{of}")
    for difference in found.differences[:_SHOWN_DIFFERENCES]:
        say(console, f"  seed {difference.seed}: here {difference.here}; there {difference.there}")
    if len(found.differences) > _SHOWN_DIFFERENCES:
        console.print(f"  and {len(found.differences) - _SHOWN_DIFFERENCES} more")
    if found.differences:
        raise typer.Exit(1)


def _check_infrastructure(result: Result, console: Console) -> None:
    """An episode that the agent could not finish says nothing about it: the figure is then only a lower bound."""
    lost = sum(StopReason(episode["stop_reason"]).infrastructure for episode in result.episodes)
    if lost:
        console.print(
            f"{lost} of {result.total} episodes were not played to their end (the server, an environment or the "
            "time was lost): they count as not solved, so play again",
            style="bold red",
            soft_wrap=True,
        )
        raise typer.Exit(1)
