"""Versions of weights on their way from a learner to its samplers."""
