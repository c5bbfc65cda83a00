"""The command line: bad input is one line and exit code 2; commands do what they say on a real small run."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import RECIPE, ROOT, Command, Outcome, contents
from safetensors.torch import load_file

from clew.checkpoint import RunLock

ONLY_HELD_OUT = ("--suite", "heldout", "evaluation.size=16")


def refused(outcome: Outcome, *fragments: str) -> None:
    """Asserts one line on stderr with these parts, and exit code 2."""
    assert outcome.code == 2, outcome
    lines = outcome.err.splitlines()
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith("clew: error: ")
    for fragment in fragments:
        assert fragment in lines[0]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe whose model does not matter, because something else is wrong."""
    path = tmp_path / "small.toml"
    path.write_text(RECIPE.format(model=tmp_path))
    return path


# --- help and version ------------------------------------------------------------------------------------


def test_help_is_quick_and_names_the_commands() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    script = "import sys; from clew.cli.main import run; run(['--help']); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT / "src")},
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    for name in ("train", "eval", "sft", "export", "report", "doctor", "prepare", "cluster"):
        assert f" {name} " in done.stdout
    assert done.stdout.splitlines()[-1] == "False"
    # Of the processor, so that a loaded machine can't fail the test.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_version(clew: Command) -> None:
    from clew import __version__

    assert clew("--version") == Outcome(0, f"clew {__version__}\n", "")


# --- bad input -------------------------------------------------------------------------------------------


def test_unknown_override_names_the_nearest_key(clew: Command) -> None:
    refused(clew("train", "laptop", "training.stepz=3"), "training.stepz", "training.steps")


def test_unknown_key_in_a_file(clew: Command, recipe: Path) -> None:
    recipe.write_text(recipe.read_text().replace("group_size", "group_sizes"))
    refused(clew("train", recipe), "algorithm.group_sizes", "algorithm.group_size", str(recipe))


def test_missing_recipe_file(clew: Command) -> None:
    refused(clew("train", "no/such.toml"), "no/such.toml", "laptop")


def test_bad_recipe_name(clew: Command) -> None:
    refused(clew("train", "labtop"), '"labtop"', '"laptop"')


def test_impossible_split(clew: Command, recipe: Path) -> None:
    refused(clew("train", recipe, "training.minibatches=5"), "training.minibatches", "12 trajectories")


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["trian", "laptop"], "trian"),
        (["train", "laptop", "--frehs"], "--frehs"),
        (["train"], "RECIPE"),
        (["eval"], "--run DIR or --model PATH"),
        (["eval", "--run", "a", "--model", "b"], "exclude each other"),
        (["eval", "--policy", "wizard", "--model", "b"], "no-turn-back"),
        (["eval", "--policy", "oracle", "--suite", "bigger"], "larger"),
        (["eval", "--policy", "oracle", "--adapter", "x"], "no model"),
        (["eval", "--run", "nowhere"], "nowhere is no run directory"),
        (["eval", "--model", "./nowhere"], "./nowhere"),
        (["report", "nowhere"], "nowhere is no run directory"),
        (["export", "nowhere", "--to", "x"], "nowhere is no run directory"),
        (["train", "laptop", 'runtime.kind="skyrl"'], "runtime.kind"),
        (["train", "laptop", "rollout.engine=vllm"], "rollout.engine"),
        (["train", "laptop", "model.path=./nowhere"], "./nowhere"),
        (["sft", "laptop", "environment.id=other/Env-v0"], "environment.id"),
    ],
)
def test_bad_arguments(clew: Command, arguments: list[str], fragment: str, tmp_path: Path) -> None:
    refused(clew(*arguments), fragment)
    assert list(tmp_path.iterdir()) == []  # nothing was begun


@pytest.mark.parametrize(
    ("override", "fragment"),
    [
        ('environment.id="clew/Labyrinth-v0"', "clew/Maze-v0"),
        ('environment.palette="neon"', "neon"),
        ('evaluation.suites=["heldout","bigger"]', "larger"),
        ('model.device="cuda"', "model.device"),
    ],
)
def test_bad_names_are_found_before_a_directory_is_made(
    clew: Command, recipe: Path, override: str, fragment: str, tmp_path: Path
) -> None:
    if "cuda" in override:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU here")
    refused(clew("train", recipe, "--run", tmp_path / "run", override), fragment)
    assert not (tmp_path / "run").exists()


def test_run_directory_that_is_a_file(clew: Command, recipe: Path) -> None:
    refused(clew("train", recipe, "--run", recipe), "is a file")


@pytest.mark.parametrize("flags", [[], ["--fresh"]])
def test_run_directory_that_holds_other_things(clew: Command, recipe: Path, flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("meow")
    refused(clew("train", recipe, "--run", tmp_path / "photos", *flags), "cat.jpg", "new folder")
    assert [p.name for p in (tmp_path / "photos").iterdir()] == ["cat.jpg"]


def test_model_folder_that_is_none(clew: Command, recipe: Path, tmp_path: Path) -> None:
    refused(clew("train", recipe, "--run", tmp_path / "run"), "model.path", str(tmp_path))


# --- a run -----------------------------------------------------------------------------------------------


def test_the_run_learned_from_groups_that_differ(finished_run: Path) -> None:
    """The small run is a fair stand-in: the policy is updated, so its bits could go wrong."""
    lines = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert sum(line["train/updates"] for line in lines[1:]) >= 2
    for name in ("recipe.toml", "timing.jsonl", "summary.json", "report.html", "tensorboard"):
        assert (finished_run / name).exists()


def test_finished_run_prints_its_summary_and_changes_nothing(
    clew: Command, small_recipe: Path, finished_run: Path
) -> None:
    before = contents(finished_run)
    outcome = clew("train", small_recipe, "--run", finished_run)
    assert outcome.code == 0
    assert "this run is finished" in outcome.out
    assert "before training" in outcome.out
    assert contents(finished_run) == before


def test_finished_run_without_its_report_gets_one(
    clew: Command, small_recipe: Path, finished_run: Path, tmp_path: Path
) -> None:
    """A kill between summary and report must not leave the run without."""
    shutil.copytree(finished_run, tmp_path / "run")
    (tmp_path / "run" / "report.html").unlink()
    assert clew("train", small_recipe, "--run", tmp_path / "run").code == 0
    assert (tmp_path / "run" / "report.html").is_file()


def test_changed_recipe_is_refused_with_its_keys(clew: Command, small_recipe: Path, finished_run: Path) -> None:
    before = contents(finished_run)
    outcome = clew("train", small_recipe, "--run", finished_run, "training.seed=6", "model.lora.rank=8")
    refused(outcome, "training.seed: 5 -> 6", "model.lora.rank: 4 -> 8", "--fresh")
    refused(clew("train", small_recipe, "--run", finished_run, "training.steps=3"), "training.steps: 4 -> 3")
    assert contents(finished_run) == before


def test_free_keys_may_change(clew: Command, small_recipe: Path, finished_run: Path) -> None:
    outcome = clew("train", small_recipe, "--run", finished_run, "checkpoint.keep=9", "tracking.tensorboard=false")
    assert outcome.code == 0


def test_recipe_may_change_while_nothing_has_been_computed(clew: Command, recipe: Path, tmp_path: Path) -> None:
    """A run that failed at its model must not hold its directory for ever."""
    run = tmp_path / "run"
    refused(clew("train", recipe, "--run", run), "model.path")
    refused(clew("train", recipe, "--run", run, "training.seed=9"), "model.path")
    assert "seed = 9" in (run / "recipe.toml").read_text()


def test_two_processes_cannot_write_one_run(
    clew: Command, small_recipe: Path, finished_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    with RunLock(tmp_path / "run"):
        for change in (["training.steps=5"], ["--fresh"]):
            refused(clew("train", small_recipe, "--run", tmp_path / "run", *change), "being written by process")
    assert contents(tmp_path / "run") == contents(finished_run)


def test_larger_steps_go_on_and_fresh_keeps_the_old_run(
    clew: Command, small_recipe: Path, finished_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert clew("train", small_recipe, "--run", run, "training.steps=2").code == 0
    outcome = clew("train", small_recipe, "--run", run)
    assert outcome.code == 0, outcome.err
    assert "going on after step 2" in outcome.out
    assert json.loads((run / "summary.json").read_text())["steps"] == 4
    weights = "adapters/step-000004/adapter_model.safetensors"
    assert contents(run)[weights] == contents(finished_run)[weights]
    grown = contents(run)

    outcome = clew("train", small_recipe, "--run", run, "--fresh", "training.steps=1", "training.seed=6")
    assert outcome.code == 0, outcome.err
    assert f"{run}.old-1" in outcome.out
    assert contents(tmp_path / "run.old-1") == grown
    assert json.loads((run / "summary.json").read_text())["seed"] == 6


def test_fresh_with_bad_input_leaves_the_old_run_in_place(
    clew: Command, small_recipe: Path, finished_run: Path
) -> None:
    refused(clew("train", small_recipe, "--run", finished_run, "--fresh", "model.path=./nowhere"), "./nowhere")
    assert (finished_run / "summary.json").is_file()


def test_fault_is_one_line_with_the_traceback_in_the_run(
    clew: Command, small_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clew.training.update import Updater

    def explode(*args: object) -> None:
        raise RuntimeError("the flux is out of phase")

    monkeypatch.setattr(Updater, "update", explode)
    outcome = clew("train", small_recipe, "--run", tmp_path / "run")
    assert outcome.code == 1
    assert len(outcome.err.splitlines()) == 1
    assert "RuntimeError: the flux is out of phase" in outcome.err
    log = tmp_path / "run" / "faults.log"
    assert str(log) in outcome.err
    assert "Traceback" in log.read_text()
    assert (tmp_path / "run" / "report.html").is_file()  # how far it came


def test_full_disk_is_one_line(
    clew: Command, small_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from clew.report.tracking import Tracker

    def no_space(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Tracker, "log", no_space)
    refused(clew("train", small_recipe, "--run", tmp_path / "run"), "the disk is full", str(tmp_path / "run"))


# --- what comes after a run ------------------------------------------------------------------------------


def test_export_best_and_by_number(clew: Command, finished_run: Path, tmp_path: Path) -> None:
    from clew.checkpoint import verify

    best = json.loads((finished_run / "summary.json").read_text())["best"]["step"]
    for step, number in (("best", best), ("4", 4)):
        outcome = clew("export", finished_run, "--step", step, "--to", tmp_path / step)
        assert outcome.code == 0, outcome.err
        source = load_file(finished_run / "adapters" / f"step-{number:06d}" / "adapter_model.safetensors")
        copied = load_file(tmp_path / step / "adapter_model.safetensors")
        assert all((copied[name] == tensor).all() for name, tensor in source.items())
        assert (tmp_path / step / "README.md").is_file()
        verify(tmp_path / step)
    refused(clew("export", finished_run, "--step", "3", "--to", tmp_path / "x"), "--step 3", "2, 4")
    refused(clew("export", finished_run, "--step", "last", "--to", tmp_path / "x"), "--step last")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    clew("export", finished_run, "--to", tmp_path / "taken")
    assert (next(tmp_path.glob("taken*/file"))).read_text() == "mine"


def test_damaged_adapter_is_named(clew: Command, finished_run: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    weights = tmp_path / "run" / "adapters" / "step-000004" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    refused(clew("export", tmp_path / "run", "--step", "4", "--to", tmp_path / "x"), "damaged", "step-000004")


def test_eval_of_a_run_gives_its_own_figure_again(clew: Command, finished_run: Path, tmp_path: Path) -> None:
    """Same adapter, same seeds: the episodes of the run's own evaluation, move by move."""
    outcome = clew("eval", "--run", finished_run, "--json", tmp_path / "out.json")
    assert outcome.code == 0, outcome.err
    written = json.loads((tmp_path / "out.json").read_text())
    step = json.loads((finished_run / "summary.json").read_text())["best"]["step"]
    assert written["step"] == step
    own = json.loads((finished_run / "eval" / f"step-{step:06d}" / "heldout.sampled.json").read_text())
    assert written["results"][0] == own
    assert f"step {step} eval/all/pass_at_1" in outcome.out


def test_eval_of_a_model_folder_and_a_suite(clew: Command, tiny_model: Path, tmp_path: Path) -> None:
    small = ["evaluation.size=4", "environment.size=4", "environment.min_path=2", "environment.max_path=6"]
    outcome = clew("eval", "--model", tiny_model, "--suite", "braided", "--json", tmp_path / "out.json", *small)
    assert outcome.code == 0, outcome.err
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [(r["suite"], r["mode"], r["total"]) for r in results] == [
        ("braided", "sampled", 4),
        ("braided", "greedy", 4),
    ]


def test_eval_of_the_oracle(clew: Command, tmp_path: Path) -> None:
    outcome = clew("eval", "--policy", "oracle", "--json", tmp_path / "out.json", *ONLY_HELD_OUT)
    assert outcome.code == 0, outcome.err
    assert "16/16" in outcome.out
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert (result["mode"], result["solved"], result["step"]) == ("oracle", 16, None)


def test_adapter_of_another_model_is_refused(clew: Command, finished_run: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(finished_run / "adapters" / "step-000004", adapter)
    from safetensors.torch import save_file

    weights = load_file(adapter / "adapter_model.safetensors")
    name = next(name for name in weights if "lora_B" in name)
    weights[name] = weights[name][:-1].contiguous()
    save_file(weights, adapter / "adapter_model.safetensors")
    refused(clew("eval", "--run", finished_run, "--adapter", adapter), str(adapter), "another model")
    refused(clew("eval", "--run", finished_run, "--adapter", tmp_path / "none"), str(tmp_path / "none"))


def test_report_of_an_unfinished_run(clew: Command, finished_run: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "report.html").unlink()
    assert clew("report", tmp_path / "run").code == 0
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.parametrize(
    ("suite", "fragment"),
    [("nope:maze", "evaluation.suites: 'nope:maze' is unknown"), ("visgym:nope/easy", "can't make 'nope/easy'")],
)
def test_a_suite_that_can_not_be_made_is_found_before_the_run_begins(
    clew: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, suite: str, fragment: str
) -> None:
    monkeypatch.setenv("CLEW_VISGYM", str(Path(__file__).parent / "standin_visgym"))
    outcome = clew("train", "laptop", f'evaluation.suites=["heldout", "{suite}"]', "--run", tmp_path / "run")
    assert outcome.code == 2 and fragment in outcome.err and len(outcome.err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_doctor_finds_visgym_where_a_recipe_names_it(clew: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLEW_VISGYM", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    standin = Path(__file__).parent / "standin_visgym"
    assert "needed for environments visgym:... only" in clew("doctor").out
    outcome = clew("doctor", "visgym")
    assert outcome.code == 1 and "clone VisGym's repository" in " ".join(outcome.out.split())
    outcome = clew("doctor", "visgym", f"runtime.visgym_path={standin}")
    assert outcome.code == 0 and str(standin) in outcome.out
    outcome = clew("doctor", "visgym", f"runtime.visgym_path={standin}", "environment.id=visgym:maze_3d/easy")
    assert (outcome.code == 1) == ("pip install ursina==7.0.0" in outcome.out)
    monkeypatch.setenv("CLEW_VISGYM", str(standin))
    assert str(standin) in clew("doctor").out


def test_doctor_names_what_is_missing(clew: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from clew.cli import doctor

    outcome = clew("doctor")
    for name in ("python", "torch", "cores", "memory", "disk", "warm start"):
        assert name in outcome.out
    monkeypatch.setattr(doctor, "_PACKAGES", ("no-such-package",))
    outcome = clew("doctor")
    assert outcome.code == 1
    assert "no-such-package" in outcome.out
    assert "missing" in outcome.out


# --- imitation -------------------------------------------------------------------------------------------


def test_sft_writes_an_ordinary_model_folder_with_a_card(tiny_model: Path) -> None:
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    from clew.checkpoint import verify
    from clew.policy.paths import base_fingerprint

    verify(tiny_model)
    assert not tiny_model.with_name("model.work").exists()
    AutoTokenizer.from_pretrained(tiny_model)
    AutoImageProcessor.from_pretrained(tiny_model)
    model = AutoModelForImageTextToText.from_pretrained(tiny_model)
    facts = json.loads((tiny_model / "sft.json").read_text())
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert facts["weights_sha256"] == base_fingerprint(str(tiny_model))
    assert facts["command"].startswith("clew sft ")
    assert facts["sft"]["steps"] == 60
    assert [row["seed"] for row in facts["evaluation"]["sampled"]] == [0, 1, 2, 3, 4]
    assert facts["evaluation"]["greedy"]["total"] == 8
    assert facts["time"]["training_s"] > 0
    card = (tiny_model / "README.md").read_text()
    for part in (facts["weights_sha256"], facts["command"], "greedy"):
        assert part in card


def test_sft_again_shows_its_figures_and_other_settings_are_refused(
    clew: Command, tiny_model: Path, small_recipe: Path
) -> None:
    outcome = clew("sft", small_recipe, "--out", tiny_model)
    assert outcome.code == 0
    assert "is finished" in outcome.out
    refused(clew("sft", small_recipe, "--out", tiny_model, "sft.steps=7"), str(tiny_model), "other settings")
    refused(clew("sft", small_recipe, "--out", small_recipe.parent), str(small_recipe.parent))


def test_shipped_warm_start_is_what_its_card_says() -> None:
    from importlib import resources

    from clew.policy.paths import base_fingerprint
    from clew.recipe import load_recipe

    folder = Path(str(resources.files("clew") / "assets" / "warm-start"))
    facts = json.loads((folder / "sft.json").read_text())
    recipe = load_recipe("laptop")
    assert facts["weights_sha256"] == base_fingerprint(str(folder))
    assert facts["command"] == "clew sft laptop"
    for name in ("environment", "sft"):  # a key that came after the model was made has its default there
        table = getattr(recipe, name)
        assert type(table).model_validate(facts[name]) == table
    assert 23 <= facts["evaluation"]["sampled_mean_solved"] <= 33
    assert facts["evaluation"]["greedy"]["total"] == 64
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 8 * 2**20
