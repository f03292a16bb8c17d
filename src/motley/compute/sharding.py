"""Shards: a policy's weights over several devices, each of which holds a part of every tensor.

Owns when a tensor is whole: a layer's are while it is walked through and while its gradient is
made, and gone from there on. Torch's `fully_shard` does that. Gradients of all devices are added
up. Knows no optimiser, and not who tells devices what to do: all must do the same at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from motley.compute.decoder import Decoder, Ready, as_it_is
from motley.compute.layers import Layer, walk_layer
from motley.compute.logprobs import Scores
from motley.compute.packed import Packed
from motley.compute.scoring import is_fused, score
from motley.compute.support import why_unknown
from motley.models.policy import Policy

WALK = "walk_with_weights"  # what a layer's module calls the walk through it


def why_unsharded(policy: Policy) -> str:
    """What keeps a policy on one device; empty where nothing does."""
    reason = why_unknown(policy.base)
    if reason or policy.one_by_one:
        return f"Motley has no forward pass of its own for it ({reason or 'packing fails'})"
    # a sum waits there for a norm of the layer before, whose weights have gone
    if is_fused(policy) and Decoder.of(policy.base).layers[0].after_mlp is not None:
        return "its layers end with a norm, which is not sharded in half types; set dtype"
    return ""


class Shards:
    always = False

    def __init__(self, policy: Policy, mesh: DeviceMesh) -> None:
        """`policy`: one that `why_unsharded` finds nothing wrong with; its parameters become the
        parts that this device holds.
        """
        self.policy, self.mesh = policy, mesh
        self._layers: list[Any] = list(policy.base.model.layers)
        self._root: Any = _Whole(policy)
        for part in (*self._layers, self._root):
            # the root too: whoever only scores leaves nothing behind that a step makes stale
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        for layer in self._layers:
            setattr(layer, WALK, _walk)
            register_fsdp_forward_method(layer, WALK)
        self._root(None)  # torch wants to have seen the whole before its parts
        self.decoder = self._root.decoder = Decoder.of(policy.base, self)

    @contextmanager
    def holding(self, index: int | None) -> Iterator[None]:
        part = self._root if index is None else self._layers[index]
        part.unshard()
        try:
            yield
        finally:
            part.reshard()

    def walk_layer(self, forward: Any, layer: Layer, state: Any, ready: Ready = as_it_is) -> Any:
        # a function, since torch takes all tensors that it is given for what enters the layer
        step = lambda state: walk_layer(forward, ready(layer), state)
        return getattr(self._layers[layer.index], WALK)(step, state)

    def score(self, packed: Packed) -> Scores:
        return Scores(*self._root(packed))

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.policy.trained()

    def parameter(self, name: str) -> DTensor:
        """This device's part of a tensor."""
        owner, _, last = name.rpartition(".")
        made = getattr(self.policy.model.get_submodule(owner), last)
        assert isinstance(made, DTensor), f"{name} is whole"
        return made

    @torch.no_grad()
    def scattered(self, name: str, value: Tensor | None) -> DTensor:
        """A value of a parameter's shape, in the same parts.

        `value`: the whole; None on all devices but the first, from which it comes.
        """
        like = self.parameter(name)
        whole = torch.empty(like.shape, dtype=like.dtype) if value is None else value
        # gloo and nccl send what lies where they compute
        sent = whole.to(like.device, like.dtype).contiguous()
        return distribute_tensor(sent, self.mesh, like.placements)

    @torch.no_grad()
    def take(self, name: str, value: Tensor | None) -> None:
        """Give a parameter a value, which comes from the first device."""
        self.parameter(name).to_local().copy_(self.scattered(name, value).to_local())


class _Whole(nn.Module):
    """The model with what scores by it, so that torch sees one forward pass."""

    decoder: Decoder

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model, self._policy = policy.model, policy

    def forward(self, packed: Packed | None) -> tuple[Tensor, ...]:
        if packed is None:
            return ()
        made = score(self._policy, packed, self.decoder)
        return made.logp_M, made.entropy_M


def _walk(step: Callable[[Any], Any], state: Any) -> Any:
    return step(state)
