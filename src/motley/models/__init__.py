"""A model: where it comes from, its vocabulary and prompts, and what of it trains."""
