"""Compile the kernels of sampling for a GPU that is not here.

A test runs it in a process of its own, since under Triton's interpreter nothing is compiled.
"""

from __future__ import annotations

import itertools
import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from motley.engines import kernels

H200 = GPUTarget("cuda", 90, 32)
INDEX = ("rows", "counts", "prompt_of", "lengths", "source", "tokens")
FLOAT = ("cosines", "sines", "query_scale", "key_scale", "logits", "leasts", "logps")
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
    if name == "uniform":
        return "*fp64"
    return "fp32" if name in NUMBER else "i32"


def compiled(kernel: object, warps: int, stages: int, **fixed: object) -> int:
    """Bytes of the program for the GPU."""
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in fixed else kind(name) for name in names},
        constexprs={(names.index(name),): value for name, value in fixed.items()},
    )
    made = triton.compile(source, target=H200, options={"num_warps": warps, "num_stages": stages})
    return len(made.asm["cubin"])


def main() -> None:
    sizes = {}
    for normed, turns in itertools.product((False, True), (False, True)):
        sizes[f"attend, normed {normed}, turns {turns}"] = compiled(
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
    sizes["least"] = compiled(kernels._least, 8, 3, CUTS=26, BLOCK=4096)
    print(json.dumps(sizes))


if __name__ == "__main__":
    main()
