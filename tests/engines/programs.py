"""The kernels of sampling, compiled for a GPU that is not here; a test runs it by itself."""

from __future__ import annotations

import itertools
import json
from functools import partial

import torch

from compiling import compiled_for_h200
from motley.engines import attention, drawing, few_rows

INDEX = ("rows", "counts", "prompt_of", "lengths", "source", "tokens", "last", "limits")
FLOAT = ("cosines", "sines", "query_scale", "key_scale", "logits", "leasts", "logps")
FLOAT += ("highests", "weights", "mixes", "cuts")
HALF = ("qkv", "out", "prompts", "own")
NUMBER = ("scaling", "eps", "sharpness", "top_p")


def kind(name: str) -> str:
    if name in INDEX:
        return "*i64"
    if name in FLOAT:
        return "*fp32"
    if name in HALF:
        return "*fp16"
    if name in ("pages", "facts"):
        return "*i32"
    if name in ("is_end", "ended"):
        return "*i1"
    if name == "uniform":
        return "*fp64"
    return "fp32" if name in NUMBER else "i32"


def compiled(kernel: object, warps: int, stages: int, **fixed: object) -> int:
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": fixed.get("EARLY", False)}
    return compiled_for_h200(kernel, kind, fixed, options)


def few_rows_sizes() -> dict[str, int]:
    sizes = {}
    for gated, rows in itertools.product((False, True), (16, 64)):
        deal_out = few_rows.gated_cut if gated else partial(few_rows.parted_cut, 1536)
        cut = deal_out(8960, rows, torch.device("cpu"))
        sizes[f"product, gated {gated}, rows {rows}"] = compiled_for_h200(
            few_rows._product,
            partial(few_rows_kind, out="*fp16" if gated else "*fp32"),
            {"BIAS": not gated, "GATED": gated, "SILU": gated, "ROWS": rows}
            | {"COLUMNS": cut.tile, "DEPTH": cut.depth, "AHEAD": cut.ahead}
            | {"PIECES": cut.pieces, "EARLY": True},
            {"num_warps": cut.warps, "num_stages": cut.stages, "launch_pdl": True},
            by_16=("x", "weight", "out", "depth", "depth_each"),
        )
    for behind in (False, True):
        sizes[f"add and norm, behind {behind}"] = compiled_for_h200(
            few_rows._add_norm,
            partial(few_rows_kind, out="*fp16"),
            {"PARTS": 7, "BEHIND": behind, "BLOCK": 2048, "EARLY": True},
            {"num_warps": 8, "num_stages": 3, "launch_pdl": True},
        )
    return sizes


def few_rows_kind(name: str, out: str) -> str:
    if name in ("rows", "width", "depth", "depth_each", "columns_each", "size"):
        return "i32"
    if name in ("x", "weight", "bias"):
        return "*fp16"
    if name in ("out", "normed"):
        return out
    return "fp32" if name in ("eps", "behind_eps") else "*fp32"


def main() -> None:
    sizes = {}
    either = (False, True)
    for normed, turns, shared in itertools.product(either, either, either):
        sizes[f"attend, normed {normed}, turns {turns}, shared {shared}"] = compiled(
            attention._attend,
            1,
            attention._stages(128, turns),
            HEADS=14,
            KV_HEADS=2,
            SIZE=64,
            NORMED=normed,
            GROUP=16,
            BLOCK=64,
            KEYS=32,
            TURNS=turns,
            SHARED=shared,
            EARLY=not turns or shared,
        )
    # a number that is 1 is known to the compiler
    sizes["attend, wide, rows of one page"] = compiled(
        attention._attend,
        1,
        attention._stages(256, True),
        row_pages=1,
        HEADS=12,
        KV_HEADS=2,
        SIZE=128,
        NORMED=True,
        GROUP=16,
        BLOCK=128,
        KEYS=32,
        TURNS=True,
        SHARED=True,
        EARLY=True,
    )
    sizes["look up"] = compiled(attention._look_up, 1, 3)
    for size in (64, 128):
        sizes[f"join, size {size}"] = compiled(
            attention._join, 1, 3, SIZE=size, SHARES=16, BLOCK=size, EARLY=True
        )
    for cut in either:
        sizes[f"weigh, cut {cut}"] = compiled(
            drawing._weigh, 4, 3, TRUNCATED=cut, FULL=cut, BLOCK=2048
        )
    for greedy, cut in ((True, False), (False, False), (False, True)):
        sizes[f"pick, greedy {greedy}, cut {cut}"] = compiled(
            drawing._pick,
            4,
            3,
            GREEDY=greedy,
            TRUNCATED=cut,
            FULL=cut,
            BLOCK=2048,
            BLOCKS=128,
        )
    sizes["weigh, one logit"] = compiled(
        drawing._weigh, 4, 3, size=1, TRUNCATED=False, FULL=False, BLOCK=1
    )
    sizes["pick, one logit, rows of one token"] = compiled(
        drawing._pick,
        4,
        3,
        size=1,
        row_tokens=1,
        GREEDY=False,
        TRUNCATED=False,
        FULL=False,
        BLOCK=1,
        BLOCKS=1,
    )
    sizes["least"] = compiled(drawing._least, 8, 3, CUTS=26, BLOCK=4096)
    sizes |= few_rows_sizes()
    print(json.dumps(sizes))


if __name__ == "__main__":
    main()
