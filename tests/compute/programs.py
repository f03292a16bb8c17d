"""The optimiser's kernel, compiled for a GPU that is not here; a test runs it by itself."""

from __future__ import annotations

import itertools
import json

from compiling import compiled_for_h200
from motley.compute.lean_kernel import BLOCKS_AT_ONCE, _step

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
    kinds = KINDS | {"values": f"*{weight}", "gradients": f"*{gradient}", "size": size}
    known = [name for name, kind in kinds.items() if kind.startswith("*") or name == "size"]
    return compiled_for_h200(
        _step,
        lambda name: kinds.get(name, "fp32"),
        FIXED,
        {"num_warps": BLOCKS_AT_ONCE},
        by_16=known if aligned else (),
    )


def main() -> None:
    halves = ("fp32", "bf16")
    cases = [*itertools.product(halves, halves, ["i32"], [True]), ("bf16", "bf16", "i64", False)]
    print(json.dumps({" ".join(map(str, case)): compiled(*case) for case in cases}))


if __name__ == "__main__":
    main()
