"""The tables of a recipe and their defaults; what ties several keys together is in ``checks``."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Literal

import tomli_w
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from clew.recipe.checks import conflicts
from clew.recipe.cluster import ClusterTable
from clew.recipe.values import (
    INT_MAX,
    Arguments,
    Fraction,
    Keywords,
    ModelPath,
    Names,
    NonNegative,
    NonNegativeNumber,
    OptionalNames,
    Positive,
    PositiveNumber,
    Size,
    Table,
    Target,
    Text,
)


class LoraTable(Table):
    """The adapter that is trained; the base model stays as it is."""

    rank: Positive = 16
    """Rank of every pair of LoRA matrices."""
    alpha: PositiveNumber = 32.0
    """LoRA scale: the update is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability that an input of a LoRA matrix is dropped in training."""
    target: Target = "all-linear"
    """What gets an adapter: all linear layers, or the modules whose names end in one of these suffixes."""
    vision: bool = False
    """Whether the vision tower gets adapters too (vLLM ignores those unless asked)."""


class ModelTable(Table):
    """The model the run starts from."""

    path: ModelPath
    """Hugging Face folder or hub id of a Qwen3-VL model, or "package:warm-start", the checkpoint shipped with Clew."""
    subfolder: Annotated[str | None, Field(min_length=1)] = None
    """Folder of the model inside its hub repository; left out: the repository itself."""
    revision: Annotated[str | None, Field(min_length=1)] = None
    """Commit, tag or branch of the hub repository; `clew prepare` keeps to the commit it found first; default: main."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the base model's weights and of the computation."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; "auto" is CUDA where there is one, otherwise the CPU."""
    lora: LoraTable = LoraTable()
    """The adapter."""

    @property
    def served_name(self) -> str:
        """What a server calls this model in ``model = BASE:ADAPTER``: the last part of where it lies."""
        last = PurePosixPath(self.subfolder or self.path.removeprefix("package:")).name
        return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-") or "base"


class GymnasiumTable(Table):
    """How environments "gym:..." are made, named and won."""

    kwargs: Keywords = Arguments()
    """Arguments of gymnasium.make, e.g. {is_slippery = false}."""
    actions: OptionalNames = None
    """Names of the actions, in the order of their numbers; left out: the numbers."""
    prompt: Annotated[str | None, Field(min_length=1)] = None
    """Instructions; left out: a sentence with the environment's name and the actions'."""
    success: Literal["reward", "return", "info"] = "reward"
    """What wins: the reward of the step that ends it, the episode's sum of rewards, or a fact of the last step."""
    success_threshold: float = 1.0
    """Least reward that wins ("reward", "return")."""
    success_key: Text = "is_success"
    """Key of the last step's info that says whether the episode was won ("info")."""


class EnvironmentTable(Table):
    """What is to be learned. Size, path bounds, braid and palette describe native mazes ("clew/...")."""

    id: Text = "clew/Maze-v0"
    """Environment id: "clew/Maze-v0", "visgym:maze_2d/easy" (a task of VisGym), "gym:FrozenLake-v1" (of Gymnasium)."""
    size: Size = (4, 6)
    """Cells of the maze: [rows, cols]; one number n means [n, n]."""
    max_turns: Positive = 15
    """Turns (answers of the agent) an episode may take."""
    goal: Literal["reach", "stop"] = "reach"
    """How an episode is won: by reaching the goal, or by saying stop on it (one more turn; VisGym's only way)."""
    min_path: Positive = 1
    """Fewest moves that a shortest solution of a maze may have."""
    max_path: Positive = 14
    """Most moves that a shortest solution of a maze may have."""
    braid: Fraction = 0.0
    """Fraction of the dead ends that are opened; 0 leaves exactly one path between two cells."""
    palette: Text = "day"
    """Name of the colours that mazes are drawn in."""
    gymnasium: GymnasiumTable = GymnasiumTable()
    """Environments of Gymnasium."""


class RolloutTable(Table):
    """How episodes are played."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """What samples the tokens."""
    temperature: PositiveNumber = 1.0
    """Sampling temperature, the scorer's too."""
    max_new_tokens: Positive = 64
    """Tokens that one answer (a turn) may have."""
    max_tokens: Positive = 4096
    """Tokens that a whole trajectory may have: prompt, images, answers and feedback."""
    deadline_s: PositiveNumber = 600.0
    """Seconds a step's rollout may take; an episode unfinished then is an infrastructure failure."""
    concurrent_episodes: Positive = 128
    """Episodes that one engine plays at a time."""
    memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.45
    """Share of a device's memory that a vLLM engine takes: weights and key/value cache (GPUs only)."""


class AlgorithmTable(Table):
    """From rewards to a loss."""

    group_size: Annotated[int, Field(ge=2, le=INT_MAX)] = 8
    """Trajectories of one task; advantages are relative to their group."""
    advantage: Literal["grpo", "grpo_no_std", "gigpo"] = "grpo"
    """Group-relative (GRPO), the same not divided by the deviation, or with a part for each turn (GiGPO)."""
    epsilon: PositiveNumber = 1e-4
    """Added to a group's standard deviation, in units of reward."""
    clip_low: Fraction = 0.2
    """The probability ratio is clipped from below at 1 - clip_low."""
    clip_high: PositiveNumber = 0.2
    """The probability ratio is clipped from above at 1 + clip_high."""
    loss_reduction: Literal["token_mean", "sequence_mean", "dr_grpo"] = "token_mean"
    """How token losses become one: mean of tokens, mean of trajectories' means, or sum / fixed length."""
    kl_coef: NonNegativeNumber = 0.0
    """Weight of the KL divergence from the base model (nats a token) in the loss; 0 leaves it out."""
    step_advantage_weight: NonNegativeNumber = 1.0
    """Weight of the part for each turn, relative to the episode's part ("gigpo" only)."""
    tis_cap: Annotated[float | None, Field(ge=0)] = None
    """Cap of a token's importance weight (trainer's / engine's probability); 0: none; left out: 2.0 with "vllm"."""


class TrainingTable(Table):
    """The optimisation. A step plays prompts_per_step * group_size trajectories, then updates the adapter."""

    steps: Positive
    """Training steps of the run."""
    prompts_per_step: Positive
    """Tasks (groups) a step."""
    learning_rate: PositiveNumber
    """Highest learning rate of AdamW."""
    warmup_steps: NonNegative = 0
    """Steps over which the learning rate grows linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up: stay, or fall to 0 at the last step."""
    weight_decay: NonNegativeNumber = 0.0
    """Decoupled weight decay of AdamW."""
    max_grad_norm: PositiveNumber = 1.0
    """The gradient is scaled down to this Euclidean norm where it is longer."""
    minibatches: Positive = 1
    """Equal parts that a step's trajectories are split into, with one optimizer update each."""
    epochs: Positive = 1
    """Passes over a step's trajectories."""
    tokens_per_microbatch: Positive = 8192
    """Tokens (padding included) in one forward pass; bounds memory, changes no result beyond rounding."""
    gradient_checkpointing: bool = False
    """Whether activations are computed again in the backward pass instead of kept: slower, far less memory."""
    seed: NonNegative = 0
    """Seed of everything random in the run: tasks, sampling, initial adapter."""


class EvaluationTable(Table):
    """What is measured, and when. The first suite is the one that the best step is chosen by."""

    suites: Names = ("heldout",)
    """Names of the suites to play."""
    size: Positive = 64
    """Tasks of each suite."""
    interval: Positive = 10
    """Training steps between two evaluations."""
    before_training: bool = True
    """Whether to evaluate at step 0, so that there is a baseline."""
    confirm_size: Positive = 256
    """Unseen tasks on which the best step is confirmed at the end."""
    references: bool = True
    """Whether to play the suites with the reference policies (random, no-turn-back, oracle) too."""
    sight: bool = True
    """Whether to test at the end that the agent uses its eyes: blank and swapped frames."""


class CheckpointTable(Table):
    """What is saved. The last step is always saved and exported."""

    interval: Positive = 20
    """Training steps between two full checkpoints."""
    keep: Positive = 3
    """Full checkpoints that are kept; older ones are deleted."""
    export_interval: Positive = 20
    """Training steps between two exports of the adapter."""


class SftTable(Table):
    """Imitation (``clew sft``): builds the tiny model and teaches it to see and to answer."""

    steps: Positive = 1500
    """Optimizer steps, both stages together."""
    episode_steps: NonNegative = 300
    """Of those, the last ones: whole episodes of the fallible navigator. The others show windows of perfect play."""
    frames_per_step: Positive = 320
    """Frames (answered turns) a step."""
    frames_per_microbatch: Positive = 160
    """Frames whose gradients are computed at once."""
    window_turns: Positive = 3
    """Turns of a window of perfect play."""
    curriculum_steps: NonNegative = 800
    """Steps over which the start of a window moves from two moves off the goal to anywhere."""
    muon_learning_rate: PositiveNumber = 0.01
    """Peak learning rate of Muon (matrices)."""
    adamw_learning_rate: PositiveNumber = 0.003
    """Peak learning rate of AdamW (embeddings, convolutions, vectors)."""
    episode_turns: Positive = 30
    """Turns a demonstrated episode may take: the navigator may wander longer than the agent will be allowed to."""
    random_moves: Fraction = 0.5
    """Share of the fallible navigator's turns in which it takes a random open side."""
    max_pixels: Annotated[int, Field(ge=32 * 32, le=4096 * 4096)] = 512 * 512
    """Pixels of a frame that the model that is built looks at: larger frames are scaled down (patches are 16 x 16)."""
    seed: NonNegative = 0
    """Seed of the weights and of the demonstrations."""


class RuntimeTable(Table):
    """Where the run happens: changes scale and speed, never meaning."""

    kind: Literal["local", "ray", "skyrl"] = "local"
    """In this process, on a Ray cluster, or with SkyRL on one."""
    nodes: Positive = 1
    """Machines with policy workers."""
    workers_per_node: Positive = 1
    """Policy workers (ranks) a machine: one a GPU."""
    engines: Positive = 1
    """Sampling engines of the whole run."""
    colocate: bool = True
    """Whether engines share the policy workers' devices."""
    shared_dir: Annotated[str | None, Field(min_length=1)] = None
    """Folder that all machines see, above runs, prepared models and task lists; left out: the working directory."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """CPU threads of a process; 0 means all cores (with "ray": the cores shared among the engines or workers)."""
    address: Annotated[str | None, Field(min_length=1)] = None
    """Ray cluster to run on (host:port or "auto"); left out: RAY_ADDRESS where that is set, or a cluster of its own."""
    visgym_path: Annotated[str | None, Field(min_length=1)] = None
    """Folder of VisGym's repository, for environments "visgym:..."; left out: what CLEW_VISGYM names."""
    env_processes: Annotated[int, Field(ge=1, le=1024)] = 2
    """Processes that VisGym's environments of one engine are spread over."""
    storage_patience_s: NonNegativeNumber = 60.0
    """Seconds for which a write to a full or unreachable shared_dir is tried again before the run stops."""
    device_memory_gb: PositiveNumber = 96.0
    """Memory of one device, in GB, that `clew cluster plan` plans for."""


class TrackingTable(Table):
    """Trackers beside the console and metrics.jsonl."""

    tensorboard: bool = True
    """Whether to write TensorBoard event files."""


class CostTable(Table):
    """Assumptions behind the cost lines of the summary."""

    device_hour_price: NonNegativeNumber = 0.0
    """Price of one device for one hour, in units of the currency."""
    currency: Text = "USD"
    """Currency of the price."""
    device_watts: NonNegativeNumber = 45.0
    """Assumed power draw of one device, in watts."""


class Recipe(Table):
    """A whole run. `name` stands at the top of the file, before the first table."""

    name: Text = "recipe"
    """What summaries and reports call the recipe; left out: the file's name without its ending."""
    model: ModelTable
    """What is trained."""
    environment: EnvironmentTable
    """What it is trained on."""
    rollout: RolloutTable = RolloutTable()
    """How it plays."""
    algorithm: AlgorithmTable = AlgorithmTable()
    """What it learns from the play."""
    training: TrainingTable
    """How long and how fast."""
    evaluation: EvaluationTable = EvaluationTable()
    """How it is measured."""
    checkpoint: CheckpointTable = CheckpointTable()
    """What is saved."""
    sft: SftTable = SftTable()
    """The warm start before it."""
    runtime: RuntimeTable = RuntimeTable()
    """Where it runs."""
    cluster: ClusterTable = ClusterTable()
    """What it runs on there."""
    tracking: TrackingTable = TrackingTable()
    """Who is told."""
    cost: CostTable = CostTable()
    """What it costs."""

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if conflict := next(conflicts(self), None):
            raise PydanticCustomError("conflict", "{message}", conflict._asdict())
        return self

    def to_toml(self) -> str:
        """The resolved recipe: every value in force (unset optional keys are left out); loads back equal."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))
