from __future__ import annotations

import platform
import warnings
from collections.abc import Iterator

import pytest
import torch

from motley.config import PeerConfig
from motley.models import devices
from motley.models.devices import choose_device, choose_dtype, is_faster, spare_onednn
from motley.models.opening import initial_policy

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def measured_anew() -> Iterator[None]:
    is_faster.cache_clear()
    yield
    is_faster.cache_clear()


def speeds(
    patch: pytest.MonkeyPatch, full: float, half: float, float16: float = 9.0
) -> list[tuple[torch.dtype, str]]:
    """Have products take these seconds, with `half` those of bfloat16; what was measured."""
    asked: list[tuple[torch.dtype, str]] = []

    def seconds(dtype: torch.dtype, device: str) -> float:
        asked.append((dtype, device))
        return {torch.float32: full, torch.bfloat16: half, torch.float16: float16}[dtype]

    patch.setattr(devices, "_seconds", seconds)
    return asked


def gpus(patch: pytest.MonkeyPatch, count: int) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: count > 0)
    patch.setattr(torch.cuda, "device_count", lambda: count)
    patch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("wanted", "count", "words"),
    [
        (
            "cuda",
            0,
            "device='cuda', and torch finds no CUDA GPU here; use auto or cpu, or install a "
            "torch built for CUDA",
        ),
        ("cuda:1", 0, "device='cuda:1', and torch finds no CUDA GPU here"),
        (
            "cuda:2",
            2,
            "device='cuda:2', and the last CUDA GPU here is cuda:1; use one that is here",
        ),
        ("mps", 0, "device='mps', and torch finds no Apple GPU here; use auto or cpu"),
    ],
)
def test_a_device_that_is_not_here_is_refused(
    wanted: str, count: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, count)
    with pytest.raises(ValueError, match=words):
        choose_device(wanted, small=True)
    with pytest.raises(ValueError, match=words):
        initial_policy(PeerConfig(name="a", model="tiny:0.3m", device=wanted), seed=0)


def test_a_device_that_is_asked_for_is_used_also_for_small_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus(monkeypatch, 2)
    assert choose_device("cuda:1", small=True) == torch.device("cuda:1")
    assert choose_device("cpu", small=False) == CPU


def test_without_a_wish_small_models_stay_on_the_cpu_and_others_go_to_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus(monkeypatch, 1)
    assert choose_device("auto", small=True) == CPU
    assert choose_device("auto", small=False) == CUDA
    gpus(monkeypatch, 0)
    assert choose_device("auto", small=False) == CPU


def test_on_a_cpu_nothing_is_measured_unless_bfloat16_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = speeds(monkeypatch, full=1.0, half=0.1)
    assert choose_dtype("auto", CPU, small=False) == torch.float32
    assert choose_dtype("float32", CPU, small=False) == torch.float32
    assert asked == []


@pytest.mark.parametrize(
    ("half", "expected"),
    [(0.1, torch.bfloat16), (0.74, torch.bfloat16), (0.8, torch.float32), (9.0, torch.float32)],
)
def test_a_gpu_uses_bfloat16_where_it_is_clearly_faster(
    half: float, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = speeds(monkeypatch, full=1.0, half=half)
    assert [choose_dtype("auto", CUDA, small=False) for _ in range(3)] == [expected] * 3
    assert len(asked) == 4  # once for each half type
    assert choose_dtype("auto", CUDA, small=True) == torch.float32


@pytest.mark.parametrize(
    ("float16", "fits", "expected"),
    [(0.1, True, torch.float16), (0.1, False, torch.bfloat16), (0.8, True, torch.bfloat16)],
)
def test_a_gpu_uses_float16_where_it_is_faster_and_holds_the_model(
    float16: float, fits: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds(monkeypatch, full=1.0, half=0.1, float16=float16)
    asked = []
    chosen = choose_dtype(
        "auto", CUDA, small=False, fits_float16=lambda: asked.append(True) or fits
    )
    assert chosen == expected
    assert len(asked) == (float16 < 0.5)  # the model is tried only where it matters
    assert (
        choose_dtype("auto", torch.device("mps"), small=False, fits_float16=lambda: True)
        == torch.bfloat16
    )


def test_float16_is_refused_without_a_cuda_gpu_before_anything_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = (
        "dtype='float16' is for CUDA GPUs, and this peer computes on cpu; use auto, float32 or "
        "bfloat16"
    )
    monkeypatch.setattr("motley.models.opening.read_model", None)
    for model in ("tiny:0.3m", "nowhere"):
        with pytest.raises(ValueError, match=words):
            initial_policy(PeerConfig(name="a", model=model, device="cpu", dtype="float16"), seed=0)
    assert choose_dtype("float16", CUDA, small=True) == torch.float16


def test_bfloat16_that_is_slower_is_used_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds(monkeypatch, full=1.0, half=5.0)
    with pytest.warns(
        UserWarning,
        match="bfloat16 is not faster than float32 on cpu; dtype = 'auto' would use float32",
    ) as caught:
        policy = initial_policy(PeerConfig(name="a", model="tiny:0.3m", dtype="bfloat16"), seed=0)
    assert len(caught) == 1
    assert policy.dtype == torch.bfloat16
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}


def test_bfloat16_that_is_faster_is_used_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds(monkeypatch, full=1.0, half=0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_dtype("bfloat16", CPU, small=True) == torch.bfloat16


def test_the_measurement_measures() -> None:
    assert devices._seconds(torch.float32, "cpu") > 0


def test_bfloat16_is_measured_without_a_word_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an Arm CPU without bfloat16, torch's first product would warn with a page of frames."""
    monkeypatch.setattr(devices, "CPU_SIZE", 64)
    was_on, *_ = torch.backends.mkldnn.set_flags(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            is_faster(torch.bfloat16, "cpu")
    finally:
        torch.backends.mkldnn.set_flags(was_on)


@pytest.mark.parametrize(
    ("machine", "has_bfloat16", "dtype", "device", "stays_on"),
    [
        ("aarch64", False, torch.bfloat16, "cpu", False),
        ("arm64", False, torch.bfloat16, "cpu", False),
        ("aarch64", True, torch.bfloat16, "cpu", True),
        ("x86_64", False, torch.bfloat16, "cpu", True),
        ("aarch64", False, torch.float16, "cpu", True),
        ("aarch64", False, torch.bfloat16, "cuda:0", True),
    ],
)
def test_onednn_is_switched_off_only_where_torch_would_do_it_itself(
    machine: str,
    has_bfloat16: bool,
    dtype: torch.dtype,
    device: str,
    stays_on: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(
        torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bfloat16, raising=False
    )
    was_on, *_ = torch.backends.mkldnn.set_flags(True)
    try:
        spare_onednn(dtype, device)
        is_on, *_ = torch.backends.mkldnn.set_flags(was_on)
    finally:
        torch.backends.mkldnn.set_flags(was_on)
    assert is_on == stays_on


def test_a_policy_has_the_device_and_dtype_chosen_for_its_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus(monkeypatch, 0)
    chosen = initial_policy(PeerConfig(name="a", model="tiny:0.3m"), seed=0)
    told = initial_policy(
        PeerConfig(name="a", model="tiny:0.3m", device="cpu", dtype="float32"), seed=0
    )
    assert {(policy.device, policy.dtype) for policy in (chosen, told)} == {(CPU, torch.float32)}
