"""Training of converted models: a few minutes that give back what the swap has cost."""

from subquad.training.recover import RecoveryReport, recover

__all__ = ["RecoveryReport", "recover"]
