"""One whole GRPO step (rollout, loss, optimizer) of Clew against TRL's GRPOTrainer doing the same work.

    benchmarks/setup_trl.sh
    .venvs/trl/bin/python benchmarks/grpo_step.py [--model FOLDER] [--form episodes|single-turns] [--repeats 5]

Compared, in one process, step by step in turn, after one step each that is not counted:

- form ``episodes`` (16 mazes x 8): whole episodes of up to 15 turns. TRL plays them with
  ``environment_factory``: the environment's one tool moves the agent and returns the next frame.
- form ``single-turns`` (160 mazes x 8): mazes whose goal is one move away, one frame and one answer a
  trajectory; about as many answers as a step of episodes has, in the form that suits TRL best.

Held equal: model folder, LoRA (rank, alpha, modules), mazes, group size, prompts (checked token by token),
caps on answers and trajectories, temperature, the full vocabulary without vision tokens, token-mean loss
clipped at 0.2, group-normalised advantages, one AdamW update over all trajectories (no KL term, no dropout),
float32, threads. The learning rate is 1e-5, so that the policy, and with it the number of tokens, stays as it
is.

``clew, all groups`` computes the loss of every trajectory, as TRL does: that is the ratio that counts.
``clew`` is the step as Clew runs it, which leaves out groups with equal rewards. Of TRL's step only
``train()``'s own time between the beginning and the end of a step is counted. TRL may take micro-batches of
``--trl-rows`` rows.

How TRL ends an episode: it goes on until the model calls no tool, so the last move's answer is made longer
than the completion budget; TRL then drops that answer and ends the trajectory there, as Clew does.
"""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import common
import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from transformers import AutoModelForImageTextToText, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from clew.agent.ledger import Trajectory
from clew.envs.base import ImageEnv
from clew.envs.maze_env import answer_text
from clew.policy.adapter import attach_lora, current_adapter
from clew.policy.vision import FeatureCache
from clew.rollout.episodes import play
from clew.rollout.transformers_engine import TransformersEngine
from clew.training.samples import prepare
from clew.training.update import Updater

LEARNING_RATE = 1e-5
ONE_MOVE = {"min_path": 1, "max_path": 1, "max_turns": 1}

# What TRL needs to find Clew's answers: <action>up</action> is the call move(action="up").
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<action>",
            "close": "</action>",
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "move", "arguments": {"action": "{content}"}},
            },
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}


class ClewSteps:
    """Clew's training step, as in ``clew.training.grpo``."""

    def __init__(self, bench: common.Bench) -> None:
        lora, training = bench.recipe.model.lora, bench.recipe.training
        self.bench = bench
        self.policy = attach_lora(bench.vlm, lora.rank, lora.alpha, lora.dropout, lora.target, lora.vision, 0)
        features = FeatureCache(bench.vlm.model.model.visual, bench.vlm.patcher)
        self.engine = TransformersEngine(bench.vlm, features)
        training = training.model_copy(update={"learning_rate": LEARNING_RATE, "warmup_steps": 0})
        self.updater = Updater(
            bench.vlm, self.policy, features, bench.recipe.algorithm, training, bench.sampling.temperature,
            bench.limits.max_tokens,
        )  # fmt: skip

    def step(self, index: int, tasks: list[Any], settings: dict[str, Any], all_groups: bool) -> list[Trajectory]:
        """Plays the tasks by whole groups and updates once."""
        self.engine.load_adapter(current_adapter(self.policy, index))
        attempts = [(task, k) for task in tasks for k in range(self.bench.recipe.algorithm.group_size)]
        make_env = self.bench.env_maker(settings)
        trajectories = play(
            self.engine,
            self.bench.player,
            make_env,
            attempts,
            self.bench.sampling,
            self.bench.limits,
            ("step", index),
        )
        samples, used = prepare(trajectories, self.bench.recipe.algorithm)
        self.updater.update(samples, [True] * len(used) if all_groups else used, index + 1)
        return trajectories


class Tools:
    """A Clew environment as TRL wants it; its public methods but ``reset`` are the tools."""

    def __init__(self, env: ImageEnv, end: str) -> None:
        self._env, self._end = env, end

    def reset(self, seed: int, **_: Any) -> list[dict[str, Any]]:
        """Starts a maze: the first frame and the instructions."""
        self._texts: list[str] = []
        self._turns, self._success = 0, False
        observation, _ = self._env.reset(seed)
        return _content(observation.image, self._env.prompt)

    def move(self, action: str) -> list[dict[str, Any]]:
        """Moves the agent.

        Args:
            action: Where to.

        Returns:
            The next frame and what happened.
        """
        observation, _, terminated, truncated, info = self._env.step(answer_text(action))
        self._turns += 1
        self._success = info["success"]
        if terminated or truncated:
            return [{"type": "text", "text": self._end}]
        self._texts.append(observation.text)
        return _content(observation.image, observation.text)


def _content(frame: Any, text: str) -> list[dict[str, Any]]:
    return [{"type": "image", "image": Image.fromarray(frame)}, {"type": "text", "text": text}]


class RecordingTrainer(GRPOTrainer):
    """TRL's trainer, with what it generated last (and single turns' rewards) at hand."""

    rewards: list[float]

    def _generate(self, prompts: list[Any]) -> Any:
        self.generated: Any = super()._generate(prompts)
        return self.generated


def make_trainer(
    bench: common.Bench, lora: LoraConfig, tasks: list[Any], steps: int, single: bool, rows: int, folder: str
) -> RecordingTrainer:
    """TRL's trainer for these tasks, ``len(tasks) / steps`` a step in their order."""
    recipe = bench.recipe
    group, n = recipe.algorithm.group_size, len(tasks) // steps * recipe.algorithm.group_size
    processor = common.hugging_face_processor(bench.path)
    assert "message.role + '\\n'" in processor.chat_template  # the tiny model's template; tools answer as users do
    processor.chat_template = processor.chat_template.replace(
        "message.role", "('user' if message.role == 'tool' else message.role)"
    ).replace(
        "{{- '<|im_end|>",
        "{%- for c in message.tool_calls or [] -%}{{- c.function | tojson -}}{%- endfor -%}{{- '<|im_end|>",
    )
    make_env = bench.env_maker(ONE_MOVE if single else {})
    row: dict[str, list[Any]] = {"seed": [t.seed for t in tasks]}
    if single:
        env = make_env()
        row["prompt"] = [[{"role": "user", "content": env.prompt}] for _ in tasks]
        row["image"] = [Image.fromarray(env.reset(t.seed)[0].image) for t in tasks]
    else:
        processor.tokenizer.response_template = RESPONSE_TEMPLATE
        row["prompt"] = [[{"role": "user", "content": ""}] for _ in tasks]

    def move_reward(completions: list[Any], seed: list[int], **_: Any) -> list[float]:
        env, rewards = make_env(), []
        for completion, s in zip(completions, seed, strict=True):
            env.reset(s)
            rewards.append(env.step(completion[0]["content"])[1])
        trainer.rewards = rewards
        return rewards

    def episode_reward(environments: list[Tools], **_: Any) -> list[float]:
        return [float(env._success) for env in environments]

    end = bench.vlm.tokenizer.pad_token * bench.limits.max_tokens
    trainer = RecordingTrainer(
        model=AutoModelForImageTextToText.from_pretrained(bench.path, dtype=torch.float32),
        processing_class=processor,
        reward_funcs=move_reward if single else episode_reward,
        environment_factory=None if single else lambda: Tools(make_env(), end),
        train_dataset=Dataset.from_dict(row),
        peft_config=lora,
        args=GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_steps=steps,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=n // rows,
            num_generations=group,
            max_completion_length=bench.limits.max_tokens,
            generation_kwargs={
                "max_new_tokens": bench.sampling.max_new_tokens,
                "suppress_tokens": bench.vlm.forbidden_ids.tolist(),
            },
            temperature=bench.sampling.temperature,
            top_k=0,
            top_p=1.0,
            beta=0.0,
            epsilon=recipe.algorithm.clip_low,
            loss_type="dapo",
            scale_rewards="group",
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            optim="adamw_torch",
            max_grad_norm=recipe.training.max_grad_norm,
            shuffle_dataset=False,
            dataloader_pin_memory=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def trl_work(bench: common.Bench, trainer: RecordingTrainer, work: common.Work) -> None:
    """Adds what TRL generated in its last step, and checks that it was shown the tokens that Clew shows.

    Raises:
        AssertionError: a token that was not sampled differs.
    """
    prompts, completions, masks = trainer.generated[:3]
    environments = trainer.environments or [None] * len(prompts)
    template, env = bench.vlm.template, bench.make_env()
    frame = env.reset(0)[0].image
    count = torch.tensor(bench.vlm.patcher.grid(frame)).prod().item() // bench.vlm.merge_size**2
    for row, (prompt, completion, tools) in enumerate(zip(prompts, completions, environments, strict=True)):
        assert list(prompt) == template.opening(env.prompt, "", count), "TRL's prompt differs from Clew's"
        sampled = len(completion)
        if tools is not None:
            shown = [i for text in tools._texts for i in template.continuation(text, count, ended=True)]
            assert [i for i, m in zip(completion, masks[row], strict=True) if not m] == shown, "TRL shows other tokens"
            sampled -= len(shown)
            work.turns += tools._turns
            work.solved += tools._success
        else:
            work.turns += 1
            work.solved += trainer.rewards[row] > 0
        work.sampled += sampled
        work.tokens += len(prompt) + len(completion)
    work.trajectories += len(prompts)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--form", choices=["episodes", "single-turns"], default="episodes")
    parser.add_argument("--trl-rows", type=int, default=16, help="rows of a micro-batch of TRL")
    parser.set_defaults(mazes=None)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    single = options.form == "single-turns"
    mazes = options.mazes or (160 if single else 16)
    bench = common.prepare(options.model, options.threads)
    settings = ONE_MOVE if single else {}
    steps = options.repeats + 1
    tasks = bench.tasks(mazes * steps, settings)
    clew = ClewSteps(bench)
    lora = clew.policy.peft_config["default"]
    same_lora = LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=lora.target_modules,
        bias="none",
    )
    watch = common.Stopwatch()
    names = ("trl", "clew, all groups", "clew")
    work = {name: common.Work() for name in names}

    class InTurn(TrainerCallback):
        """Times TRL's step, then Clew's two on the same mazes."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.trl = watch.time("trl" if state.global_step else "warm-up")
            self.trl.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.trl.__exit__(None, None, None)
            index = state.global_step - 1
            chosen = tasks[index * mazes : (index + 1) * mazes]
            trl_work(bench, trainer, work["trl"] if index else common.Work())
            for name in names[1:]:
                with watch.time(name if index else "warm-up"):
                    trajectories = clew.step(index, chosen, settings, all_groups=name != "clew")
                if index:
                    work[name].add(trajectories)
            if index:
                print(f"step {index}: " + ", ".join(f"{n} {watch.seconds[n][-1]:.2f} s" for n in names))

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(bench, same_lora, tasks, steps, single, options.trl_rows, folder)
        trainer.add_callback(InTurn())
        trainer.train()

    print(
        f"\n{options.form}, {mazes} mazes x {bench.recipe.algorithm.group_size}, {options.repeats} steps each, medians:"
    )
    for name in names:
        print(f"{name:17} {watch.median(name):8.3f} s a step   ({watch.spread(name)} s)")
        print(f"{'':17} {work[name]}")
    print(f"trl / clew, all groups  {watch.median('trl') / watch.median('clew, all groups'):6.2f}x  (target 5x)")
    print(f"trl / clew              {watch.median('trl') / watch.median('clew'):6.2f}x")


if __name__ == "__main__":
    main()
