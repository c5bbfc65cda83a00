"""SkyRL's own check of a configuration, and of what that check lets pass (needs ``skyrl``; written for 0.4.0)."""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from clew.errors import UserError

INSTALL = (
    "SkyRL is not installed here: use an environment with skyrl 0.4.0 and skyrl-gym 0.4.0 (Python 3.12 or later, on "
    "GPUs SkyRL's published image) and install Clew into it with `pip install --no-deps`"
)
# Values that are no string by SkyRL's annotation, and that its code takes all the same.
_LISTS_TOO = ("trainer.policy.model.lora.target_modules", "trainer.policy.model.lora.exclude_modules")


def installed() -> bool:
    """Whether SkyRL can be imported."""
    return find_spec("skyrl") is not None and find_spec("skyrl_gym") is not None


def prepare_import() -> None:
    """Must run before SkyRL is imported on Python 3.11, whose own TypedDict Pydantic refuses in SkyRL's models."""
    if sys.version_info < (3, 12):
        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict  # type: ignore[misc,assignment,unused-ignore]


def validate(overrides: Mapping[str, Any] | Sequence[str]) -> Any:
    """The configuration that SkyRL makes of overrides, if there is nothing wrong with it.

    Args:
        overrides: option to value, or ``key=value`` words as on SkyRL's own command line.

    Returns:
        ``skyrl.train.config.SkyRLTrainConfig``.

    Raises:
        UserError: an unknown option, a value that SkyRL refuses, or one that it should refuse; one line.
    """
    prepare_import()
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.utils import validate_cfg

    given = dict(overrides) if isinstance(overrides, Mapping) else list(overrides)
    try:
        config = SkyRLTrainConfig.from_cli_overrides(given)
        wrong = [*_wrong_types(config), *_let_pass(config)]
        if not wrong:
            validate_cfg(config)
    except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"SkyRL refuses this configuration: {error or type(error).__name__}") from error
    if wrong:
        raise UserError(f"SkyRL's configuration: {'; '.join(wrong)}")
    return config


def _wrong_types(config: Any, prefix: str = "") -> Iterator[str]:
    """SkyRL takes any value for any option, and fails hours later where a number was a word."""
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _wrong_types(value, f"{name}.")
        elif not _is_a(value, hints[field.name]) and not (name in _LISTS_TOO and _is_a(value, list[str])):
            expected = getattr(hints[field.name], "__name__", None) or str(hints[field.name])
            yield f"{name}={value!r} is not what SkyRL expects ({expected})"


def _is_a(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_is_a(value, argument) for argument in arguments)
    if origin is Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(_is_a(item, arguments[0]) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def _let_pass(config: Any) -> Iterator[str]:
    """What SkyRL accepts and then ignores, cuts or fails at."""
    from skyrl.train.utils.tracking import Tracking
    from skyrl.train.utils.trainer_utils import ResumeMode
    from transformers import SchedulerType

    trainer, generator = config.trainer, config.generator
    policy, engine, placement = trainer.policy, generator.inference_engine, trainer.placement
    modes = [mode.value for mode in ResumeMode]
    schedules = [schedule.value for schedule in SchedulerType]
    for key, value, known in (
        ("trainer.logger", trainer.logger, Tracking.supported_backends),
        ("trainer.resume_mode", trainer.resume_mode, [None, *modes]),
        ("trainer.policy.optimizer_config.scheduler", policy.optimizer_config.scheduler, schedules),
    ):
        if value not in known:
            yield f"{key}={value} is none of {', '.join(map(str, known))}"
    if trainer.algorithm.zero_variance_filter and generator.vision_language_generator:
        yield "trainer.algorithm.zero_variance_filter does nothing where observations are images"
    ranks = placement.policy_num_nodes * placement.policy_num_gpus_per_node
    if trainer.train_batch_size * generator.n_samples_per_prompt % ranks:
        yield (
            f"trainer.train_batch_size={trainer.train_batch_size} times generator.n_samples_per_prompt="
            f"{generator.n_samples_per_prompt} is no multiple of the {ranks} policy workers: SkyRL would drop tasks"
        )
    if policy.model.lora.rank and generator.vision_language_generator and not policy.model.lora.exclude_modules:
        yield "trainer.policy.model.lora.exclude_modules must leave the vision tower out: vLLM ignores adapters there"
    mode = engine.engine_init_kwargs.get("logprobs_mode")
    if generator.sampling_params.temperature != 1.0 and mode != "processed_logprobs":
        yield (
            "generator.inference_engine.engine_init_kwargs.logprobs_mode must be processed_logprobs: vLLM would report "
            "log-probabilities without the temperature that SkyRL's trainer divides by"
        )
