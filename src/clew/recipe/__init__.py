"""A recipe: one TOML file that describes a whole run, read into frozen, checked tables (no torch here)."""

from clew.recipe.cluster import ClusterTable
from clew.recipe.loading import load_recipe, parse_recipe, shipped_recipes
from clew.recipe.reference import recipe_reference_markdown
from clew.recipe.resume import differences
from clew.recipe.schema import (
    AlgorithmTable,
    CheckpointTable,
    CostTable,
    EnvironmentTable,
    EvaluationTable,
    GymnasiumTable,
    LoraTable,
    ModelTable,
    Recipe,
    RolloutTable,
    RuntimeTable,
    SftTable,
    TrackingTable,
    TrainingTable,
)
from clew.recipe.values import WARM_START

__all__ = [
    "WARM_START",
    "AlgorithmTable",
    "CheckpointTable",
    "ClusterTable",
    "CostTable",
    "EnvironmentTable",
    "EvaluationTable",
    "GymnasiumTable",
    "LoraTable",
    "ModelTable",
    "Recipe",
    "RolloutTable",
    "RuntimeTable",
    "SftTable",
    "TrackingTable",
    "TrainingTable",
    "differences",
    "load_recipe",
    "parse_recipe",
    "recipe_reference_markdown",
    "shipped_recipes",
]
