"""Figures a user can measure again: each benchmark prints its own anchor beside ours."""
