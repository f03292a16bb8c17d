"""Motley: a crew of different language models that train each other."""

__version__ = "0.5.0"
