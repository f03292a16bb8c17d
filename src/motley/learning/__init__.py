"""Select groups, build batches, take one training step, save it."""
