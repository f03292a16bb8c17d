"""Training objectives: parts, and the table of methods made from them.

Knows tensors; knows no learner, record or transport.
"""

from motley.objectives.about import about
from motley.objectives.batch import LossBatch, LossOutput, Samples, SpanTable, Terms
from motley.objectives.beside import kept_of, rescue_of
from motley.objectives.objective import Objective
from motley.objectives.table import OBJECTIVES, VARIANTS, objective

__all__ = [
    "OBJECTIVES",
    "VARIANTS",
    "LossBatch",
    "LossOutput",
    "Objective",
    "Samples",
    "SpanTable",
    "Terms",
    "about",
    "kept_of",
    "objective",
    "rescue_of",
]
