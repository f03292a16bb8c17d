"""Hostile peers, and what they can do to a crew."""
