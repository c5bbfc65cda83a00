"""HyperPod's watch for hung jobs: the machine's job monitor is told what a policy worker's output looks like.

The monitor reads the output of Ray's workers, by job and worker id; a driver's is not among it. So the first policy
worker of each machine posts the rules (with the toolkit for Ray on SageMaker) and then prints a line a step.
"""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from typing import Any

from clew.recipe import Recipe

HOST = "HYPERPOD_JMA_HOST"
"""Variable with the machine's address, where the monitor listens; the manifests of `clew cluster render` set it."""
TOOLKIT = "toolkit_for_ray_on_sagemaker_ai"
_UPDATE_S, _START_S = 1800.0, 3600.0
"""Seconds that the update and the checkpoint of a step may take, and machines, weights and engines at the start."""


def step_line(step: int) -> str:
    """What a watched worker prints when it has trained a step."""
    return f"step {step} trained"


def rules(recipe: Recipe) -> list[dict[str, Any]]:
    """The rules of a run: a hang is when no step ends for longer than rollouts, evaluations and an update may take."""
    passes = 1 + 2 * len(recipe.evaluation.suites)  # the step's own rollout, and each suite sampled and greedy
    longest_s = passes * recipe.rollout.deadline_s + _UPDATE_S
    return [
        {
            "name": "clew_training_step",
            "type": "log_pattern",
            "enabled": True,  # a rule is off unless it says so
            "log_pattern": r"step \d+ trained",
            "timeout_minutes": math.ceil(longest_s / 60),
            "start_timeout_minutes": math.ceil((longest_s + _START_S) / 60),
            "stop_pattern": step_line(recipe.training.steps) + "$",  # what comes after the last step prints none
            "metric_evaluation_data_points": 3,
            "fault_on_match": False,
        }
    ]


def post_rules(recipe: Recipe) -> str | None:
    """Posts the rules from a Ray worker; a failure to do so is told and stops nothing.

    Returns:
        A line that says what came of it; None where there is no monitor to post to.
    """
    if not os.environ.get(HOST):
        return None
    if find_spec(TOOLKIT) is None:
        return f'hung jobs are not watched for: {HOST} is set, but the toolkit is missing (pip install "clew[aws]")'
    from toolkit_for_ray_on_sagemaker_ai.log_monitoring import LogMonitorConfig, SageMakerLogMonitoring

    config = LogMonitorConfig(enabled=True, rules=rules(recipe), action="notify")
    try:
        result = SageMakerLogMonitoring(config=config).start().result
    except Exception as error:  # a watch that can't be set up is no reason not to train
        return f"warning: hung jobs are not watched for ({type(error).__name__}: {error})"
    if result["status"] != "configured":
        reason = result.get("message") or result.get("reason") or result["status"]
        return f"warning: hung jobs are not watched for ({reason})"
    return f"hung jobs: the machine's monitor reports when no step ends for {config.rules[0]['timeout_minutes']} min"
