"""What SkyRL leaves on the disk: checkpoints to go on from, and exports to evaluate and serve (no SkyRL needed)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import PeftModel

from clew.checkpoint import verify
from clew.errors import UserError
from clew.policy.adapter import attach_lora, read_adapter, tensors_hash
from clew.recipe import load_recipe
from clew.runtime.adapters import copy_adapter, exported_steps, find_adapter, find_subject
from clew.runtime.skyrl.checkpoints import ASIDE, LATEST, checkpoints, prepare_resume
from clew.runtime.skyrl.exports import exported, find_export, solve_rates

RANKS = 2


def save(folder: Path, step: int, ranks: int = RANKS, latest: bool = True) -> Path:
    """A checkpoint in SkyRL's order: the shards of all ranks, the data position, the trainer's state, ``latest``."""
    place = folder / f"global_step_{step}"
    (place / "policy" / "huggingface").mkdir(parents=True)
    for rank in range(ranks):
        for kind in ("model", "optim", "extra_state"):
            shard = {"weight": torch.arange(64.0) + step, "rank": rank}
            torch.save(shard, place / "policy" / f"{kind}_world_size_{ranks}_rank_{rank}.pt")
    torch.save({"position": step}, place / "data.pt")
    torch.save({"global_step": step}, place / "trainer_state.pt")
    if latest:
        (folder / LATEST).write_text(str(step))
    return place


def named(folder: Path) -> str:
    return (folder / LATEST).read_text()


def test_nothing_there_is_a_start_from_the_beginning(tmp_path: Path) -> None:
    assert prepare_resume(tmp_path / "none", RANKS).step == 0
    assert not (tmp_path / "none").exists()
    assert prepare_resume(tmp_path, RANKS).notes == ()


def test_whole_checkpoints_are_left_as_they_are(tmp_path: Path) -> None:
    save(tmp_path, 20)
    save(tmp_path, 100)
    before = sorted(tmp_path.rglob("*"))
    assert prepare_resume(tmp_path, RANKS) == prepare_resume(tmp_path, RANKS)
    assert prepare_resume(tmp_path, RANKS).step == 100 and not prepare_resume(tmp_path, RANKS).notes
    assert sorted(tmp_path.rglob("*")) == before


PARTS = [
    *(f"policy/{kind}_world_size_2_rank_{rank}.pt" for kind in ("model", "optim", "extra_state") for rank in (0, 1)),
    "data.pt",
    "trainer_state.pt",
]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("harm", ["missing", "cut", "empty"])
def test_a_partial_checkpoint_is_set_aside_and_the_one_before_is_used(tmp_path: Path, part: str, harm: str) -> None:
    """SkyRL itself would go on without an optimizer's state, or from the start of the data."""
    save(tmp_path, 20)
    file = save(tmp_path, 40, latest=False) / part
    content = file.read_bytes()
    file.unlink()
    if harm != "missing":
        file.write_bytes(content[: len(content) // 2] if harm == "cut" else b"")
    resume = prepare_resume(tmp_path, RANKS)
    assert resume.step == 20 and named(tmp_path) == "20"
    (note,) = resume.notes
    assert part in note and "global_step_40" in note
    aside = tmp_path / f"{ASIDE}global_step_40-1"
    assert aside.is_dir() and aside.name in note
    assert [c.step for c in checkpoints(tmp_path, RANKS)] == [20], "SkyRL must not count it when it deletes old ones"


@pytest.mark.parametrize("name", ["data.pt", "trainer_state.pt"])
def test_a_flipped_byte_in_a_small_file_is_found(tmp_path: Path, name: str) -> None:
    save(tmp_path, 20)
    file = save(tmp_path, 40) / name
    content = bytearray(file.read_bytes())
    content[content.index(b"position" if name == "data.pt" else b"global_step")] ^= 1
    file.write_bytes(content)
    assert prepare_resume(tmp_path, RANKS).step == 20


@pytest.mark.parametrize("text", ["", "\n", "soon", None, "20", "60"])
def test_the_latest_file_names_the_newest_whole_one(tmp_path: Path, text: str | None) -> None:
    """Killed while SkyRL wrote it, the file is empty (SkyRL raises), absent, or older than what is there."""
    save(tmp_path, 20)
    save(tmp_path, 40, latest=False)
    (tmp_path / LATEST).unlink()
    if text is not None:
        (tmp_path / LATEST).write_text(text)
    resume = prepare_resume(tmp_path, RANKS)
    assert resume.step == 40 and named(tmp_path) == "40" and len(resume.notes) == 1


def test_a_first_checkpoint_that_was_never_finished_is_a_start_from_the_beginning(tmp_path: Path) -> None:
    (save(tmp_path, 20, latest=False) / "data.pt").unlink()
    (tmp_path / LATEST).write_text("")
    assert prepare_resume(tmp_path, RANKS).step == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{ASIDE}global_step_20-1", f"{ASIDE}{LATEST}-1"]


def test_damage_to_the_last_one_is_an_error_that_names_it(tmp_path: Path) -> None:
    """It was finished, so the run must not silently begin anew."""
    (save(tmp_path, 20) / "policy" / "optim_world_size_2_rank_1.pt").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"global_step_20.*optim_world_size_2_rank_1\.pt.*--fresh"):
        prepare_resume(tmp_path, RANKS)
    assert (tmp_path / "global_step_20").is_dir() and named(tmp_path) == "20"


@pytest.mark.parametrize("partial", [False, True])
def test_a_last_one_that_is_gone_is_no_start_from_the_beginning(tmp_path: Path, partial: bool) -> None:
    """What is left may be an older one that was never whole; SkyRL would train from step 0."""
    if partial:
        (save(tmp_path, 20) / "data.pt").unlink()
    (tmp_path / LATEST).write_text("40")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"global_step_40: .*it is gone.*--fresh"):
        prepare_resume(tmp_path, RANKS)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_has_exported_is_not_at_its_beginning(tmp_path: Path) -> None:
    folder, exports = tmp_path / "checkpoints", tmp_path / "exports"
    (exports / "dumped_evals" / "global_step_0_evals").mkdir(parents=True)
    assert prepare_resume(folder, RANKS, exports).step == 0, "an evaluation before training is no training"
    (exports / "global_step_20" / "policy").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no whole checkpoint.*exports.global_step_20\).*--fresh"):
        prepare_resume(folder, RANKS, exports)
    save(folder, 20)
    assert prepare_resume(folder, RANKS, exports).step == 20


def test_a_latest_file_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    save(tmp_path, 20, latest=False)
    (tmp_path / LATEST).mkdir()
    with pytest.raises(UserError, match=rf"^\S*{LATEST} can't be read \(Is a directory\): move it away.*$"):
        prepare_resume(tmp_path, RANKS)
    (tmp_path / LATEST).rmdir()
    assert prepare_resume(tmp_path, RANKS).step == 20


def test_shards_of_another_number_of_workers_do_not_hide_those_of_this_one(tmp_path: Path) -> None:
    """SkyRL reads the files that its own number of workers names."""
    place = save(tmp_path, 20)
    shutil.copytree(save(tmp_path / "other", 20, ranks=4) / "policy", place / "policy", dirs_exist_ok=True)
    assert [prepare_resume(tmp_path, ranks).step for ranks in (2, 4)] == [20, 20]
    with pytest.raises(UserError, match="by 4 policy workers"):
        prepare_resume(tmp_path, 3)


def test_another_number_of_workers_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 20, ranks=4)
    with pytest.raises(UserError, match=r"by 4 policy workers.*over 2 \(runtime\.nodes"):
        prepare_resume(tmp_path, RANKS)
    assert prepare_resume(tmp_path, 4).step == 20


def test_a_name_that_skyrl_cannot_read_is_moved_out_of_its_way(tmp_path: Path) -> None:
    save(tmp_path, 20)
    shutil.copytree(tmp_path / "global_step_20", tmp_path / "global_step_20-copy")
    assert prepare_resume(tmp_path, RANKS).step == 20
    assert (tmp_path / f"{ASIDE}global_step_20-copy-1").is_dir()


# --- exports ---------------------------------------------------------------------------------------------


def export_adapter(run: Path, step: int, solved: int | None = None) -> Path:
    """An export as SkyRL 0.4.0 writes it: PEFT's ``save_pretrained``, then the base's configuration and tokenizer."""
    folder = run / "exports" / f"global_step_{step}" / "policy"
    vlm = tiny.tiny()
    policy = attach_lora(vlm, 4, 8.0, 0.0, seed=step)
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    policy.save_pretrained(folder, state_dict=policy.state_dict(), safe_serialization=True)
    for file in Path(vlm.path).glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    if solved is not None:
        evals = run / "exports" / "dumped_evals" / f"global_step_{step}_evals"
        evals.mkdir(parents=True)
        figures = {
            "eval/all/pass_at_1": 1.0,  # any reward counts there
            "eval/all/environment/solved": 8 + solved,  # all of another suite's
            "eval/all/environment/episodes": 16,
            "eval/all/environment/heldout/solved": solved,
            "eval/all/environment/heldout/episodes": 8,
            "eval/all/environment/visgym-maze_2d-easy/solved": 8,
            "eval/all/environment/visgym-maze_2d-easy/episodes": 8,
        }
        (evals / "aggregated_results.jsonl").write_text(json.dumps(figures) + "\n")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SkyRL run with exports; the one of step 40 is the best. Not to be changed."""
    run = tmp_path_factory.mktemp("skyrl") / "run"
    for step, solved in ((20, 3), (40, 6), (60, 6)):
        export_adapter(run, step, solved)
    (run / "exports" / "global_step_80").mkdir()  # nothing in it yet
    (run / "recipe.toml").write_text(load_recipe("hyperpod", ["runtime.kind=skyrl"]).to_toml())
    return run


def test_an_export_is_recognised_for_what_it_is(run: Path, tmp_path: Path) -> None:
    adapter = find_export(run / "exports" / "global_step_40")
    assert adapter is not None and adapter == find_export(run / "exports" / "global_step_40" / "policy")
    assert (adapter.kind, adapter.step, adapter.base) == ("adapter", 40, tiny.tiny().path)
    whole = find_export(Path(tiny.tiny().path))
    assert whole is not None and (whole.kind, whole.base, whole.step) == ("model", None, None)
    assert find_export(tmp_path) is None
    assert list(exported(run)) == [20, 40, 60] == exported_steps(run)


def test_the_best_is_the_first_that_solved_most(run: Path) -> None:
    assert find_adapter(run, "best") == (40, run / "exports" / "global_step_40" / "policy")
    assert find_adapter(run, "60")[0] == 60
    with pytest.raises(UserError, match=r"--step 50: .*20, 40, 60"):
        find_adapter(run, "50")


def test_solve_rates_are_those_of_the_suite_that_is_asked_for(run: Path) -> None:
    assert solve_rates(run, "heldout") == {20: 3 / 8, 40: 6 / 8, 60: 6 / 8}
    assert solve_rates(run, "visgym:maze_2d/easy") == {20: 1.0, 40: 1.0, 60: 1.0}
    assert solve_rates(run, "larger") == {}


def test_an_evaluation_that_was_cut_short_is_left_out(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run/exports/dumped_evals/global_step_40_evals/aggregated_results.jsonl").write_text('{"eval/all')
    assert find_adapter(tmp_path / "run", "best")[0] == 60


def test_a_copy_is_whole_and_loads_in_peft(run: Path, tmp_path: Path, clew: Any) -> None:
    outcome = clew("export", run, "--to", tmp_path / "served")
    assert outcome.code == 0, outcome.err
    facts = verify(tmp_path / "served").facts
    own = read_adapter(run / "exports" / "global_step_40" / "policy")
    assert facts["sha256"] == tensors_hash(own.tensors) and facts["adapter"].startswith("step-000040-")
    assert not (tmp_path / "served" / "config.json").exists(), "an adapter that looks like a model is loaded as one"
    loaded = PeftModel.from_pretrained(tiny.tiny().model, tmp_path / "served")
    assert any("lora_B" in name and parameter.any() for name, parameter in loaded.named_parameters())


def test_an_adapter_that_is_not_finite_is_not_served(run: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(run, tmp_path / "run")
    weights = tmp_path / "run/exports/global_step_40/policy/adapter_model.safetensors"
    tensors = load_file(weights)
    next(iter(tensors.values())).view(-1)[0] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(UserError, match="not finite"):
        copy_adapter(tmp_path / "run", "40", tmp_path / "served")
    assert not (tmp_path / "served").exists()


def test_paths_of_exports_stand_for_what_is_in_them(run: Path, tmp_path: Path) -> None:
    step, base = run / "exports" / "global_step_40", tiny.tiny().path
    assert find_subject(base, step) == (base, step / "policy")
    assert find_subject(str(step), None) == (base, step / "policy")
    assert find_subject(str(step / "policy"), None) == (base, step / "policy")
    assert find_subject("package:warm-start", None) == ("package:warm-start", None)
    assert find_subject(base, tmp_path) == (base, tmp_path), "another tool's adapter is no business of SkyRL's"
    with pytest.raises(UserError, match="whole model"):
        find_subject(base, Path(base))
    with pytest.raises(UserError, match="an adapter itself"):
        find_subject(str(step), step)


def test_eval_plays_an_export(run: Path, tmp_path: Path, clew: Any) -> None:
    """Named as model, as adapter or by its run, it is the same policy."""
    settings = ["evaluation.size=4", "environment.max_turns=15", "rollout.max_new_tokens=4", "runtime.threads=1"]
    step, base = run / "exports" / "global_step_40", tiny.tiny().path
    for name, arguments in {
        "model": ["--model", step],
        "adapter": ["--model", base, "--adapter", step / "policy"],
    }.items():
        outcome = clew("eval", *arguments, "--suite", "heldout", "--json", tmp_path / f"{name}.json", *settings)
        assert outcome.code == 0, outcome.err
    records = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("model", "adapter")]
    assert records[0] == records[1]
    assert records[0]["model"] == base and records[0]["adapter"] == str(step / "policy")
