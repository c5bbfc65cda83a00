"""``clew cluster plan``: who runs where, and whether it fits, before a cluster is paid for."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.padding import Padding
from rich.table import Table

from clew.recipe import Recipe
from clew.runtime.budget import GB, Budget, Plan, make_plan
from clew.runtime.placement import HEAD_CPUS, Placement
from clew.runtime.process import prepare_process
from clew.runtime.sizes import amount


def show_plan(recipe: Recipe, console: Console) -> None:
    """Prints the plan of a recipe.

    Raises:
        UserError: it cannot fit or divide; the message names the numbers and the remedy.
    """
    prepare_process(recipe)
    plan = make_plan(recipe)
    console.print(_heading(plan), markup=False, highlight=False)
    console.print(_who_runs_where(plan.placement, recipe, plan.gpu))
    console.print(_lines(_sizes(plan)))
    for budget in plan.budgets:
        console.print(_memory(budget))
    console.print(_lines(_consequences(plan)))


def _heading(plan: Plan) -> str:
    runtime = plan.recipe.runtime
    if runtime.kind == "local":
        return f"{plan.recipe.name}: everything in one process"
    shared = "colocated with the workers" if runtime.colocate else "on devices of their own"
    each = " each" if runtime.nodes > 1 else ""
    return (
        f"{plan.recipe.name}: {_of(runtime.nodes, 'node')} with {_of(runtime.workers_per_node, 'policy worker')}{each}"
        f", {_of(runtime.engines, 'engine')} ({plan.recipe.rollout.engine}) {shared}"
    )


def _who_runs_where(placement: Placement, recipe: Recipe, gpu: bool) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("machine", "device", "policy rank", "engine"):
        table.add_column(column)
    if recipe.runtime.kind != "local":
        table.add_row("head", "-", f"no work (num-cpus {HEAD_CPUS})", "", end_section=True)
    for node in placement.nodes:
        for device in node.devices:
            table.add_row(
                f"node {node.index}" if device.index == 0 else "",
                f"{'GPU' if gpu else 'CPU share'} {device.index}",
                "" if device.rank is None else str(device.rank),
                "" if device.engine is None else str(device.engine),
                end_section=device is node.devices[-1],
            )
    return table


def _sizes(plan: Plan) -> Iterator[tuple[str, str]]:
    recipe, model, episode = plan.recipe, plan.model, plan.episode
    folder = f" ({recipe.model.subfolder})" if recipe.model.subfolder else ""
    yield (
        "model",
        f"{recipe.model.path}{folder}, {recipe.model.dtype}: {amount(model.base)} parameters, {amount(model.vision)} "
        f"of them vision; LoRA of rank {recipe.model.lora.rank}: {amount(model.lora)}; configuration: "
        f"{plan.source.origin}",
    )
    parts, ranks, engines = recipe.training.minibatches, len(plan.placement.ranks), recipe.runtime.engines
    minibatch = plan.trajectories // parts
    yield (
        "step",
        f"{recipe.training.prompts_per_step} tasks x {recipe.algorithm.group_size} = {plan.trajectories} trajectories; "
        f"{_each(plan.trajectories, engines)} an engine; {_of(parts, 'minibatch')} of {minibatch}, "
        f"{_each(minibatch, ranks)} a policy rank",
    )
    height, width = episode.frame
    estimate = " (texts estimated)" if episode.estimated else ""
    longest = min(episode.longest, recipe.rollout.max_tokens)
    yield (
        "episode",
        f"a frame of {height} x {width} pixels is {episode.frame_tokens} tokens; {episode.opening} tokens before the "
        f"first answer, {episode.turn} between two{estimate}, answers up to {episode.answer}, {episode.turns} turns: "
        f"at most {longest:,} tokens",
    )
    if episode.longest > recipe.rollout.max_tokens:
        fixed = episode.opening + (episode.turns - 1) * episode.turn
        average = (recipe.rollout.max_tokens - fixed) // episode.turns
        yield (
            "",
            f"rollout.max_tokens = {recipe.rollout.max_tokens} ends an episode early where its answers average more "
            f"than {max(average, 0)} tokens",
        )


def _memory(budget: Budget) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, show_footer=True, title_justify="left", title_style="bold")
    table.title = f"Memory of {budget.device}, in GB"
    table.add_column("item", "total", no_wrap=True)
    table.add_column("playing", _gb(budget.playing), justify="right", no_wrap=True)
    table.add_column("updating", _gb(budget.updating), justify="right", no_wrap=True)
    table.add_column("how", f"of {budget.memory / GB:.1f} GB", overflow="fold")
    for item in budget.items:
        table.add_row(item.name, _gb(item.playing), _gb(item.updating), item.how)
    return table


def _consequences(plan: Plan) -> Iterator[tuple[str, str]]:
    cache = plan.cache
    yield (
        "cache",
        f"{_size(cache.pool)} of key/value cache an engine, {cache.token:,} B a token: {cache.whole_episodes:,} of "
        f"the longest episodes at once; it plays {cache.wanted:,} at a time, which all fit up to {cache.tokens_each:,} "
        "tokens each",
    )
    yield ("adapter", f"{_size(plan.adapter)} move to the engines every step (LoRA in float32)")
    yield (
        "head",
        f"{_size(plan.head_lora)} to consolidate the LoRA shards (weights and two AdamW states); the whole model in "
        f"float32 would take {_size(plan.head_model)}",
    )
    for budget in plan.budgets:
        phase = "playing" if budget.playing >= budget.updating else "updating"
        yield (
            "fits",
            f"{budget.device}: at most {_gb(budget.peak)} of {budget.memory / GB:.1f} GB, while {phase}; "
            f"{_size(budget.memory - budget.peak)} to spare",
        )


def _lines(lines: Iterator[tuple[str, str]]) -> Padding:
    """Labels with texts that wrap beside them."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for label, text in lines:
        grid.add_row(label, text)
    return Padding(grid, (0, 0, 1, 0))


def _size(size: int) -> str:
    return decimal(size, precision=2)


def _gb(size: int) -> str:
    if size == 0:
        return "-"
    return f"{size / GB:.1f}" if size >= 10 * GB else f"{size / GB:.2f}" if size >= GB else f"{size / GB:.3f}"


def _of(count: int, thing: str) -> str:
    plural = f"{thing}es" if thing.endswith("ch") else f"{thing}s"
    return f"{count} {thing if count == 1 else plural}"


def _each(count: int, parts: int) -> str:
    """How many each part gets: "32", or "10 to 11"."""
    low, more = divmod(count, parts)
    return f"{low} to {low + 1}" if more else str(low)
