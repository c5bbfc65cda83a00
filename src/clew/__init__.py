"""Clew trains vision-language agents by reinforcement learning on tasks they see and solve over many turns."""

__version__ = "0.1.0"
