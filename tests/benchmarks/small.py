"""Sizes at which the whole GPU benchmark takes seconds on a CPU."""

from __future__ import annotations

from motley.benchmarks.bench import Sizes

SMALL = Sizes(
    copied_bytes=2**20,
    product=64,
    repeats=1,
    prompt=6,
    new_tokens=12,
    generate_tokens=6,
    few_tokens=2,
    sequences=(4, 8),
    generate_sequences=4,
    contexts=(16, 32),
    context_sequences=3,
    full_sequences=(5,),
    full_tokens=3,
    problems=3,
    samples=4,
    ragged_median=6,
    ragged_shortest=2,
    ragged_longest=20,
    rows=8,
    row_tokens=20,
    trl_rows=6,
)
