"""The kernels of sampling, compiled for a GPU that is not here; a test runs it by itself."""

from __future__ import annotations

import itertools
import json

from compiling import compiled_for_h200
from motley.engines import kernels

INDEX = (
    "rows",
    "counts",
    "prompt_of",
    "lengths",
    "source",
    "tokens",
    "all_tokens",
    "last",
    "limits",
)
FLOAT = ("cosines", "sines", "query_scale", "key_scale", "logits", "leasts", "logps")
FLOAT += ("highests", "weights", "mixes", "all_logps")
HALF = ("qkv", "out", "prompts", "own")
NUMBER = ("scaling", "eps", "sharpness", "top_p")


def kind(name: str) -> str:
    if name in INDEX:
        return "*i64"
    if name in FLOAT:
        return "*fp32"
    if name in HALF:
        return "*fp16"
    if name == "pages":
        return "*i32"
    if name in ("is_end", "ended"):
        return "*i1"
    if name == "uniform":
        return "*fp64"
    return "fp32" if name in NUMBER else "i32"


def compiled(kernel: object, warps: int, stages: int, **fixed: object) -> int:
    options = {"num_warps": warps, "num_stages": stages}
    return compiled_for_h200(kernel, kind, fixed, options)


def main() -> None:
    sizes = {}
    either = (False, True)
    for normed, turns, shares in itertools.product(either, either, (1, 16)):
        sizes[f"attend, normed {normed}, turns {turns}, shares {shares}"] = compiled(
            kernels._attend,
            1,
            3,
            HEADS=14,
            KV_HEADS=2,
            SIZE=64,
            NORMED=normed,
            GROUP=16,
            BLOCK=64,
            KEYS=32,
            TURNS=turns,
            SHARES=shares,
            LEAST=4,
        )
    # a number that is 1 is known to the compiler
    sizes["attend, wide, rows of one page"] = compiled(
        kernels._attend,
        1,
        3,
        row_pages=1,
        HEADS=12,
        KV_HEADS=2,
        SIZE=128,
        NORMED=True,
        GROUP=16,
        BLOCK=128,
        KEYS=32,
        TURNS=True,
        SHARES=16,
        LEAST=4,
    )
    for size in (64, 128):
        sizes[f"join, size {size}"] = compiled(
            kernels._join, 1, 3, SIZE=size, SHARES=16, BLOCK=size
        )
    for greedy, cut in ((True, False), (False, False), (False, True)):
        sizes[f"draw, greedy {greedy}, cut {cut}"] = compiled(
            kernels._draw,
            8,
            3,
            GREEDY=greedy,
            TRUNCATED=cut,
            FULL=cut,
            BLOCK=4096,
            BLOCKS=16,
        )
    sizes["draw, rows of one token"] = compiled(
        kernels._draw,
        8,
        3,
        row_tokens=1,
        GREEDY=False,
        TRUNCATED=False,
        FULL=False,
        BLOCK=4096,
        BLOCKS=64,
    )
    sizes["least"] = compiled(kernels._least, 8, 3, CUTS=26, BLOCK=4096)
    sizes["note"] = compiled(kernels._note, 1, 3, LANES=32)
    sizes["note, one lane and token"] = compiled(
        kernels._note, 1, 3, lanes=1, row_tokens=1, LANES=32
    )
    print(json.dumps(sizes))


if __name__ == "__main__":
    main()
