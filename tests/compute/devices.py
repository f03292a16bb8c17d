"""Where kernels are tested: on the GPU, or on the CPU by Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
needs_interpreter = pytest.mark.skipif(
    not INTERPRETED, reason="needs TRITON_INTERPRET=1, which a machine with a GPU does not set"
)
DEVICES = [
    pytest.param("cpu", marks=needs_interpreter),
    pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu]),
]
