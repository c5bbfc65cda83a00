"""What `clew submit` takes and what it refuses, before a cluster hears of it: addresses, recipes, working sets."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT, Command
from hypothesis import given
from hypothesis import strategies as st

from clew.cloud import address as addresses
from clew.cloud import working_set
from clew.cloud.address import check_address
from clew.cloud.command import refuse_secrets
from clew.cloud.secrets import holds_secret, is_secret_file
from clew.cloud.working_set import RECIPE_FILE, module_folder, pack
from clew.errors import UserError
from clew.recipe import load_recipe, parse_recipe

# ---- addresses


@pytest.fixture
def toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the toolkit were installed."""
    monkeypatch.setattr(addresses, "find_spec", lambda name: name)


@pytest.mark.usefixtures("toolkit")
@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:8265",
        "http://[::1]:8265",
        "https://ray.example.com",
        "https://ray.example.com:8443/a/prefix",
        "sagemaker_ray://maze/team-a",
        "sagemaker_ray://maze",
        "sagemaker_ray://ray-dashboard.spaces.example.com",
    ],
)
def test_addresses_that_are_taken(address: str) -> None:
    assert check_address(address) == address
    assert check_address(address + "/") == address


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("sagemaker_ray://", "names no cluster: give sagemaker_ray://CLUSTER/NAMESPACE"),
        ("sagemaker_ray:///team-a", "names no cluster"),
        ("sagemaker_ray://a/b/c", "too many parts: give sagemaker_ray://CLUSTER/NAMESPACE, e.g. sagemaker_ray://a/b"),
        ("sagemaker_ray://Maze/team-a", "'Maze' is no name of a cluster"),
        ("sagemaker_ray://maze/team_a", "'team_a' is no name of a namespace"),
        ("sagemaker_ray://dashboard.example.com/x", "DASHBOARD-HOST"),
        ("sagemaker_ray://ma ze/x", "spaces"),
        ("http://my host:8265", "spaces"),
        ("http://höst:8265", "odd characters"),
        ("", "has no scheme"),
        ("127.0.0.1:8265", "has no scheme: give http://127.0.0.1:8265"),
        ("auto", "has no scheme"),
        ("http://cluster", "has no port: the dashboard's is usually 8265, http://cluster:8265"),
        ("http://", "names no host"),
        ("http://:8265", "names no host"),
        ("http://a_b:8265", "names no host"),
        ("http://host:port", "is no address"),
        ("http://host:99999", "is no address"),
        ("http://me:geheim@host:8265", "a user or a password"),
        ("https://host/?token=geheim", "a query, as a browser's sign-in link does"),
        ("https://host#geheim", "a query, as a browser's sign-in link does"),
        ("sagemaker_ray://host.example.com/?token=geheim", "a query, as a browser's sign-in link does"),
        ("host.example.com/bearer-auth?token=geheim", "a query, as a browser's sign-in link does"),
        ("http://me:geheim@host:99999", "a user or a password"),
        ("ftp://me:geheim@host", "a user or a password"),
        ("me:geheim 2@host:8265", "a user or a password"),
        ("ray://head:10001", "is a Ray Client's; jobs go to the dashboard: give http://head:8265"),
        ("ftp://host:21", "jobs can't be sent by ftp://"),
        ("os://x", "jobs can't be sent by os://"),  # Ray would import a module of that name
    ],
)
def test_addresses_that_are_refused(address: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        check_address(address)
    assert said in str(caught.value) and "geheim" not in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=40) | st.from_regex(r"(https?|sagemaker_ray|ray)://[!-~]{0,30}", fullmatch=True))
def test_any_text_is_an_address_or_refused_in_one_line(text: str) -> None:
    try:
        taken = check_address(text)
    except UserError as error:
        assert "\n" not in str(error)
        return
    assert taken == check_address(taken)
    scheme, _, rest = taken.partition("://")
    assert rest.count("/") <= 1 or scheme != "sagemaker_ray"


def test_a_missing_toolkit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "clew\[aws\]"'):
        check_address("sagemaker_ray://maze/team-a")


# ---- recipes


NOBODY = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["laptop", "training.stepz=3"], "unknown key training.stepz"),
        (["laptop", "training.steps=0"], "training.steps must be"),
        (["nowhere.toml"], "nowhere.toml does not exist"),
        (["laptop", "environment.palette=sepia", "--run", "/shared/run"], "palette"),
        (["laptop"], "runtime.shared_dir is left out and --run is not given: it would lie in the job's temporary"),
        (["laptop", "--run", "runs/a"], "--run runs/a would lie in the job's temporary folder"),
        (["laptop", "runtime.shared_dir=/s", "model.path=./here"], "is a folder of this machine"),
        (["laptop", "runtime.shared_dir=/s", "model.path=here"], "is a folder of this machine"),
        (["laptop", "--run", "/s/run", "model.path=VisGym/visgym_model"], "VisGym/visgym_model has to be downloaded"),
        (["laptop", "--run", "/s/run", "--retry", "2", "--no-follow"], "--no-follow doesn't wait for that"),
        (["laptop", "--run", "/s/run"], f"--address {NOBODY}: nobody answers there (Connection refused)"),
    ],
)
def test_bad_input_gets_one_line(clew: Command, arguments: list[str], said: str) -> None:
    outcome = clew("submit", *arguments, "--address", NOBODY)
    assert outcome.code == 2 and said in outcome.err and len(outcome.err.splitlines()) == 1, outcome


@pytest.mark.parametrize("command", ["status", "logs", "stop"])
def test_nobody_there_gets_one_line(clew: Command, command: str) -> None:
    outcome = clew(command, "--address", NOBODY)
    assert outcome.code == 2 and "nobody answers there" in outcome.err and len(outcome.err.splitlines()) == 1, outcome


@pytest.mark.parametrize(
    "override",
    [
        'environment.gymnasium.kwargs={api_key = "x"}',
        'environment.gymnasium.kwargs={inner = {hf-token = "x"}}',
        "name=hf_" + "a1B2" * 9,
        "environment.gymnasium.prompt=AKIA" + "Q" * 16,
    ],
)
def test_a_recipe_with_a_secret_is_not_sent(override: str) -> None:
    recipe = load_recipe("laptop", [override])
    with pytest.raises(UserError, match="looks like a secret") as caught:
        refuse_secrets(recipe)
    assert "a1B2" not in str(caught.value)
    refuse_secrets(load_recipe("hyperpod"))


# ---- working sets


def write(folder: Path, *names: str, content: str = "x\n") -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


LAKES = (ROOT / "examples" / "frozen_lake.toml").read_text()


def test_a_shipped_recipe_goes_alone_and_loads_back_equal(tmp_path: Path) -> None:
    recipe = load_recipe("laptop", ["training.steps=7"])
    assert module_folder("laptop", recipe) is None
    packed = pack(recipe, None, tmp_path)
    assert list(packed.files) == [RECIPE_FILE] == os.listdir(tmp_path)
    assert load_recipe(str(tmp_path / RECIPE_FILE)) == recipe
    assert packed.describe().startswith("working set: clew-recipe.toml, ")


def test_modules_beside_a_recipe_go_with_it_and_nothing_else(tmp_path: Path) -> None:
    project, staging = tmp_path / "project", tmp_path / "staging"
    staging.mkdir()
    wanted = ["lakes.toml", "frozen_lake.py", "helpers/__init__.py", "helpers/maps.txt", "tokenizer.json", "env/x.py"]
    write(project, *wanted)
    (project / "lakes.toml").write_text(LAKES)
    write(project, "runs/a/metrics.jsonl", "mine/recipe.toml", "mine/metrics.jsonl", "mine/eval/a.json")
    write(project, "model/config.json", "model/model.safetensors", "adapter.safetensors", "weights.bin", "a.pt")
    write(project, ".git/config", ".venv/bin/python", "venv/x", "other/pyvenv.cfg", "other/x.py", "__pycache__/a.pyc")
    write(project, ".env", ".env.local", ".netrc", ".aws/credentials", ".kube/config", "kubeconfig", "server.pem")
    write(
        project, "tls.key", "id_rsa", "id_ed25519.pub", "hf_token", "token.txt", "aws-credentials.csv", "secrets.toml"
    )
    write(project, "secrets/a.txt", "my-credentials/b/c.txt")
    write(project, "begun/recipe.toml", "begun/.lock", "begun/eval/step-000000/heldout.sampled.json")
    (project / "link.py").symlink_to(tmp_path / "outside.py")
    (project / "helpers" / "up").symlink_to(tmp_path, target_is_directory=True)
    write(tmp_path, "outside.py")
    recipe = load_recipe(str(project / "lakes.toml"))
    assert module_folder(str(project / "lakes.toml"), recipe) == project
    packed = pack(recipe, project, staging)
    assert sorted(packed.files) == sorted([*wanted, RECIPE_FILE])
    there = {str(path.relative_to(staging)) for path in staging.rglob("*") if path.is_file()}
    assert there == set(packed.files), "what is listed is what goes"
    assert all((staging / name).stat().st_size == size for name, size in packed.files.items())
    assert f"{len(packed.files)} files" in packed.describe() and "frozen_lake.py" in packed.describe()
    again = tmp_path / "again"
    again.mkdir()
    assert pack(recipe, project, again).digest == packed.digest
    write(project, "frozen_lake.py", content="y\n")
    changed = tmp_path / "changed"
    changed.mkdir()
    assert pack(recipe, project, changed).digest != packed.digest


def test_a_recipe_whose_module_lies_elsewhere_goes_alone(tmp_path: Path) -> None:
    (tmp_path / "lakes.toml").write_text(LAKES)
    assert module_folder(str(tmp_path / "lakes.toml"), load_recipe(str(tmp_path / "lakes.toml"))) is None


def test_a_working_set_that_is_too_large_names_its_largest_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    write(project, "small.py", "frozen_lake.py")
    write(project, "data/frames.npy", content="x" * 9000)
    write(project, "maps.csv", content="x" * 3000)
    monkeypatch.setattr(working_set, "LIMIT", 10_000)
    recipe = parse_recipe(LAKES, source="test")
    with pytest.raises(UserError) as caught:
        pack(recipe, project, tmp_path / "never")
    assert f"{project} would go to the cluster with 1" in str(caught.value)
    assert "(largest: data/frames.npy 9.0 kB, maps.csv 3.0 kB, " in str(caught.value)
    assert "shared file system" in str(caught.value)
    assert not (tmp_path / "never").exists()
    monkeypatch.setattr(working_set, "FILES_LIMIT", 3)
    with pytest.raises(UserError, match="more than 3 files"):
        pack(recipe, project, tmp_path / "never")


def test_a_key_inside_a_file_stops_the_packing(tmp_path: Path) -> None:
    write(tmp_path / "project", "frozen_lake.py", content="KEY = 'AKIA" + "Z" * 16 + "'\n")
    (tmp_path / "staging").mkdir()
    with pytest.raises(UserError, match=r"frozen_lake.py would go .* looks like a key") as caught:
        pack(parse_recipe(LAKES, source="test"), tmp_path / "project", tmp_path / "staging")
    assert "ZZZ" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"x" * 1_500_000 + b"\nhf_" + b"a1B2" * 9,  # a notebook with its pictures
        ("token: hf_" + "a1B2" * 9).encode("utf-16"),
        b"\xff\xfe\0\x80 hf_" + b"a1B2" * 9,
    ],
    ids=["large", "UTF-16", "binary"],
)
def test_a_key_is_found_wherever_it_is(tmp_path: Path, content: bytes) -> None:
    write(tmp_path / "project", "frozen_lake.py")
    (tmp_path / "project" / "notes").write_bytes(content)
    (tmp_path / "staging").mkdir()
    with pytest.raises(UserError, match="looks like a key"):
        pack(parse_recipe(LAKES, source="test"), tmp_path / "project", tmp_path / "staging")


def test_what_cannot_go_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, project, staging = parse_recipe(LAKES, source="test"), tmp_path / "project", tmp_path / "staging"
    write(project, "frozen_lake.py", "helpers/maps.py")
    staging.mkdir()
    real = os.scandir

    def scandir(path: str) -> object:  # root may read everything
        if str(path).endswith("helpers"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"helpers, which would go .* Permission"):
        patch.setattr(os, "scandir", scandir)
        pack(recipe, project, staging)
    os.close(os.open(os.fsencode(project) + b"/caf\xe9.txt", os.O_CREAT | os.O_WRONLY))
    with pytest.raises(UserError, match=r"the name of 'caf\\udce9.txt' in .* is not UTF-8"):
        pack(recipe, project, staging)


def test_what_is_taken_for_a_secret() -> None:
    for name in ("tokenizer.json", "tokens.py", "keys.py", "environment.py", "maze_token_counts.py", "monkey.png"):
        assert not is_secret_file(name), name
    for name in ("API_TOKEN.txt", "Server.PEM", "my-secret.yaml", "id_rsa.bak", "gcp-credentials.json"):
        assert is_secret_file(name), name
    assert holds_secret("-----BEGIN RSA PRIVATE KEY-----") and holds_secret("-----BEGIN PRIVATE KEY-----")
    assert holds_secret(f"aws_secret_access_key = {'wJalr/XUtn' * 4}") and holds_secret("glpat-" + "a1B2" * 5)
    assert holds_secret(f'"SecretAccessKey": "x", "awsSecretAccessKey": "{"wJalr+XUtn" * 4}"')
    assert holds_secret("github_pat_" + "a1B2" * 20) and holds_secret("AIza" + "a1B2_" * 7)
    assert not holds_secret((ROOT / "examples" / "frozen_lake.py").read_text())
    for name in ("laptop", "gpu", "visgym", "hyperpod"):
        assert not holds_secret(load_recipe(name).to_toml())
    assert tomllib.loads(LAKES)["environment"]["id"].startswith("gym:frozen_lake:")
