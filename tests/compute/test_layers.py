"""The one walk through a layer, and projections over one input as one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from architectures import own_code_policy
from motley.compute.decoder import Decoder
from motley.compute.layers import Adapter, Layer, Norm, Projection, walk


class Told:
    """A pass that only says what it is asked for; its state is what was said so far."""

    def __init__(self, layer: Layer) -> None:
        self._names = {
            id(getattr(layer, name)): name
            for name in (
                "attention_norm",
                "after_attention",
                "mlp_norm",
                "after_mlp",
                "out",
                "down",
            )
        }

    def norm(self, state: list[str], norm: Norm) -> tuple[list[str], Tensor]:
        return [*state, self._names[id(norm)]], torch.zeros(1, len(norm.weight))

    def attend(self, layer: Layer, x: Tensor) -> Tensor:
        return torch.full((1, 1), 1.0 * sum(project(x).shape[1] for project in layer.qkv))

    def gate(self, layer: Layer, x: Tensor) -> Tensor:
        return torch.full((1, 1), 1.0 * sum(project(x).shape[1] for project in layer.gate_up))

    def add(
        self, state: list[str], projection: Projection, x: Tensor, after: Norm | None
    ) -> list[str]:
        behind = "" if after is None else f", {self._names[id(after)]}"
        return [*state, f"{self._names[id(projection)]} of {int(x)}{behind}"]


@pytest.mark.parametrize("kind", ["qwen2", "gemma3"])
def test_a_layer_is_walked_through_in_order(kind: str) -> None:
    layer = Decoder.of(own_code_policy(kind).base).layers[0]
    behind = ("", "") if kind == "qwen2" else (", after_attention", ", after_mlp")
    # queries, keys and values are 32 + 16 + 16 wide, gates and ups 40 each
    assert walk(Told(layer), [layer], []) == [
        "attention_norm",
        f"out of 64{behind[0]}",
        "mlp_norm",
        f"down of 80{behind[1]}",
    ]


def test_the_layers_know_their_places() -> None:
    decoder = Decoder.of(own_code_policy("qwen3").base)
    assert [layer.index for layer in decoder.layers] == [0, 1]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("adapted", [(), (0,), (2,), (0, 1, 2)])
def test_several_projections_as_one_stand_side_by_side(
    adapted: tuple[int, ...], stacked: bool
) -> None:
    x, sizes = random(5, 6, seed=0), (8, 4, 4)
    weights = [random(size, 6, seed=size + i) for i, size in enumerate(sizes)]
    biases = [random(size, seed=20 + i) for i, size in enumerate(sizes)]
    adapters = tuple(
        (Adapter(random(2, 6, seed=30 + i), random(size, 2, seed=40 + i), 0.5),)
        if i in adapted
        else ()
        for i, size in enumerate(sizes)
    )
    expected = [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    for i in adapted:
        ((A, B, scaling),) = adapters[i]
        expected[i] = expected[i] + scaling * x @ A.T @ B.T
    together = Projection(
        (torch.cat(weights),) if stacked else tuple(weights), torch.cat(biases), sizes, adapters
    )
    assert not together.is_bare
    torch.testing.assert_close(together(x), torch.cat(expected, 1))
    for i, size in enumerate(sizes):
        alone = Projection((weights[i],), biases[i], (size,), (adapters[i],))
        torch.testing.assert_close(alone(x), expected[i])
