"""Compile the optimiser's kernel for a GPU that is not here.

A test runs it in a process of its own, since under Triton's interpreter nothing is compiled.
"""

from __future__ import annotations

import itertools
import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from motley.compute.lean_kernel import BLOCKS_AT_ONCE, _step

H200 = GPUTarget("cuda", 90, 32)
KINDS = {
    "first_codes": "*u8",
    "first_scales": "*fp32",
    "second_codes": "*u8",
    "second_scales": "*fp32",
    "blocks": "i32",
    "seed": "i64",
}
FIXED = {"OCTAVES_SIGNED": 21, "OCTAVES": 32, "ROWS": BLOCKS_AT_ONCE, "BLOCK": 256}


def compiled(weight: str, gradient: str, size: str, aligned: bool) -> int:
    """Bytes of the program for the GPU. `aligned`: tensors begin, and their size is, at 16s."""
    names = _step.arg_names
    kinds = KINDS | {"values": f"*{weight}", "gradients": f"*{gradient}", "size": size}
    signature = {n: "constexpr" if n in FIXED else kinds.get(n, "fp32") for n in names}
    known = [n for n in names if aligned and (signature[n].startswith("*") or n == "size")]
    source = ASTSource(
        fn=_step,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in FIXED.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in known},
    )
    made = triton.compile(source, target=H200, options={"num_warps": BLOCKS_AT_ONCE})
    return len(made.asm["cubin"])


def main() -> None:
    halves = ("fp32", "bf16")
    cases = [*itertools.product(halves, halves, ["i32"], [True]), ("bf16", "bf16", "i64", False)]
    print(json.dumps({" ".join(map(str, case)): compiled(*case) for case in cases}))


if __name__ == "__main__":
    main()
