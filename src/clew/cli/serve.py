"""``clew serve``: from options to a server."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from clew.errors import UserError
from clew.recipe import WARM_START, ModelTable, load_recipe


def run_serve(
    model: str,
    adapters: str | None,
    name: str | None,
    host: str,
    port: int,
    max_adapters: int,
    api_key_file: Path | None,
    engine: str,
    recipe: str,
    console: Console,
) -> None:
    """Serves until Ctrl-C.

    Raises:
        UserError: options that do not go together, or a part that is missing.
        KeyboardInterrupt: it was stopped.
    """
    if find_spec("ray") is None:
        raise UserError('clew serve needs Ray, which is not installed: pip install "clew[ray]"')
    from clew.policy.paths import resolve_model_path
    from clew.runtime.adapters import find_subject
    from clew.serving.keys import read_server_key
    from clew.serving.serve import Options, choose_engine, serve

    key = read_server_key(api_key_file)
    chosen = choose_engine(engine)
    base, adapter = find_subject(model, None)
    if adapter is not None:  # an export that holds an adapter stands for its base model and itself
        if adapters is not None:
            raise UserError(f"--model {model} is an adapter itself: leave --adapters out, or give its base as --model")
        adapters = str(adapter)
    if model.startswith("package:") and model != WARM_START:
        raise UserError(f"--model {model}: the package has no such model; it has {WARM_START}")
    folder = resolve_model_path(ModelTable(path=base or model))
    if not Path(folder).is_dir():
        raise UserError(f"--model {model}: there is no such folder; `clew prepare` makes one of a hub's model")
    if name is None:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", "warm-start" if model == WARM_START else Path(folder).name).strip("-.")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name, re.ASCII):
        raise UserError(f"--name {name}: use at most 128 letters, digits, '.', '_' and '-'")
    serve(Options(folder, name, adapters, host, port, max_adapters, key, chosen, load_recipe(recipe, ())), console)
