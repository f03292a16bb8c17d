"""Compile Triton kernels for a GPU that is not here.

In a process of its own, since under Triton's interpreter nothing is compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


def sizes_of(programs: ModuleType, cache: Path) -> dict[str, int]:
    """What a module prints that compiles kernels: bytes of each program, by name."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folder = str(Path(__file__).parent)
    path = os.pathsep.join([folder, own.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, str(programs.__file__)],
        env=own | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    sizes: dict[str, int] = json.loads(ran.stdout)
    return sizes


def compiled_for_h200(
    kernel: Any,
    kind: Callable[[str], str],
    fixed: Mapping[str, object],
    options: Mapping[str, int],
    by_16: Collection[str] = (),
) -> int:
    """Bytes of the program. `by_16`: arguments that are known to be multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in fixed else kind(name) for name in names},
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in by_16},
    )
    target = GPUTarget("cuda", 90, 32)
    return len(triton.compile(source, target=target, options=dict(options)).asm["cubin"])
