"""Participants in processes of their own, on one machine or many, and the hub between them."""
