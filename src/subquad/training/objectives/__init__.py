"""Objectives: what training minimises.

`Objective` is one of plain arguments, as a recipe's section `objective` has them. Its parts stand
in files of their own: cross entropy, what a decoder is fed, scheduled sampling, noise, guided
attention, sequence-level training.
"""

from subquad.training.objectives.objective import Losses, Objective

__all__ = ["Losses", "Objective"]
