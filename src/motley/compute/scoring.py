"""Log-probs of completion tokens, with gradient.

Differs from calling the transformers model on padded rows: a prompt shared by a group is computed
once (on a CPU also what its short completions begin with alike), linear layers see no padding, and
the vocabulary projection sees only the positions that predict a completion token. Owns no batching:
`Packed` is built by learning.batches.

Models that `support` knows have a forward of our own: a plain one here, and the same in a GPU's
half types in `fused`. Any other runs its own code, with only the attention replaced by ours; where
that is not enough, on one sequence after the other (`alone`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from motley.compute.alone import logits_alone, score_alone
from motley.compute.attention import PackedAttention
from motley.compute.decoder import Decoder, known_decoder
from motley.compute.layers import Layer, Norm, Projection, walk
from motley.compute.logprobs import LOGITS_AT_ONCE, Scores, project, score_hidden
from motley.compute.packed import Packed
from motley.compute.parts import rotate
from motley.compute.shared_prefixes import Merged
from motley.compute.support import runs_kernels
from motley.models.policy import Policy
from motley.models.sources import quiet

ATTENTION = "motley"  # what transformers knows our attention by
PLAINEST = "eager"
# what some layers ask of attention, and neither torch's nor ours does
UNUSUAL = ("softcap", "s_aux", "position_bias")


def score(policy: Policy, packed: Packed, decoder: Decoder | None = None) -> Scores:
    """Score every completion token of a packed batch.

    `decoder`: the policy's, for whoever scores again and again; otherwise it is read anew.
    """
    packed = packed.to(policy.device)
    if policy.one_by_one:
        prepare(policy)
        return score_alone(policy, packed)
    with torch.cuda.device_of(packed.token_N):  # where Triton starts its kernels
        return score_hidden(
            predicting_states(policy, packed, decoder), policy.base.get_output_embeddings(), packed
        )


@torch.no_grad()
def target_logits(
    policy: Policy, packed: Packed, wanted: Sequence[int] | None = None
) -> Iterator[Tensor]:
    """What `score` makes log-probs of, before the temperature: [m, V] in float32 of some targets
    after the other, in their order.

    `wanted`: of these targets only, which are in order.
    """
    packed = packed.to(policy.device)
    chosen = range(len(packed.target_M)) if wanted is None else wanted
    if policy.one_by_one:
        prepare(policy)
        first = 0
        for logits_MV in logits_alone(policy, packed):
            behind = first + len(logits_MV)
            yield logits_MV[[m - first for m in chosen if first <= m < behind]]
            first = behind
        return
    head = policy.base.get_output_embeddings()
    hidden_MD = predicting_states(policy, packed)[list(chosen)]
    for hidden_mD in hidden_MD.split(max(1, LOGITS_AT_ONCE // head.out_features)):
        yield project(hidden_mD, head)


def predicting_states(policy: Policy, packed: Packed, decoder: Decoder | None = None) -> Tensor:
    """[M, D], the state that predicts each target, in the dtype of its projection."""
    decoder = decoder or known_decoder(policy.base)
    if policy.device.type == "cpu" and not is_fused(policy):
        merged = Merged.of(packed)
        return _hidden_states(policy, merged, decoder).index_select(0, merged.predictor_M).float()
    # index_select would add up its gradient on a GPU in any order
    hidden_MD = _hidden_states(policy, packed, decoder)[packed.predictor_M]
    return hidden_MD.to(policy.dtype) if is_fused(policy) else hidden_MD.float()


def is_fused(policy: Policy) -> bool:
    """Whether it computes in a half type by our kernels."""
    return policy.dtype != torch.float32 and runs_kernels(policy.device)


def _hidden_states(policy: Policy, packed: Packed | Merged, decoder: Decoder | None) -> Tensor:
    """Final hidden state of every packed token.

    Products in the policy's dtype, sums and norms in float32.
    """
    checkpointed = policy.gradient_checkpointing and torch.is_grad_enabled()
    if decoder is not None and isinstance(packed, Packed) and is_fused(policy):
        from motley.compute.fused import fused_states

        return fused_states(decoder, packed, policy.dtype, checkpointed)
    with torch.autocast(
        policy.device.type, dtype=policy.dtype, enabled=policy.dtype != torch.float32
    ):
        if decoder is None:
            return _by_its_own_code(policy, packed)
        return plain_states(decoder, packed, checkpointed)


def plain_states(decoder: Decoder, packed: Packed | Merged, checkpointed: bool) -> Tensor:
    hidden_ND = decoder.embed(packed.token_N)
    hidden_ND = walk(
        _PlainPass(decoder, packed),
        decoder.layers,
        hidden_ND,
        checkpointed,
        decoder.held.walk_layer,
    )
    return decoder.norm(hidden_ND)


class _PlainPass:
    """By torch's own operations, one after the other."""

    def __init__(self, decoder: Decoder, packed: Packed | Merged) -> None:
        self._decoder = decoder
        self._rotations = decoder.rotations(packed.position_N)
        self._attend = PackedAttention(packed)

    def norm(self, state: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        return state, norm(state)

    def attend(self, layer: Layer, x: Tensor) -> Tensor:
        size = self._decoder.heads.size
        query, key, value = (project(x).view(len(x), -1, size) for project in layer.qkv)
        query = query if layer.query_norm is None else layer.query_norm(query)
        key = key if layer.key_norm is None else layer.key_norm(key)
        cos_N1d, sin_N1d = (table[:, None] for table in self._rotations[layer.rotation])
        query, key = (
            rotate(heads.float(), cos_N1d, sin_N1d).to(value.dtype) for heads in (query, key)
        )
        return self._attend(query, key, value, layer.scaling, layer.window).flatten(1)

    def gate(self, layer: Layer, x: Tensor) -> Tensor:
        gate, up = (project(x) for project in layer.gate_up)
        return self._decoder.act(gate) * up

    def add(self, state: Tensor, projection: Projection, x: Tensor, after: Norm | None) -> Tensor:
        made = projection(x)
        return state + (made if after is None else after(made))


def _by_its_own_code(policy: Policy, packed: Packed | Merged) -> Tensor:
    """The model's forward on one row of all packed tokens.

    A mask of one element keeps transformers from making one of N x N.
    """
    prepare(policy)
    model, checkpointed = policy.base, policy.gradient_checkpointing
    if checkpointed != bool(model.is_gradient_checkpointing):
        model.gradient_checkpointing_enable(
            {"use_reentrant": False}
        ) if checkpointed else model.gradient_checkpointing_disable()
    model.train(checkpointed)  # transformers checkpoints in training mode only
    output = model.base_model(
        input_ids=packed.token_N[None],
        position_ids=packed.position_N[None],
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=packed.token_N.device),
        use_cache=False,
        packed_attention=PackedAttention(packed),
    )
    hidden_ND: Tensor = output[0][0]
    return hidden_ND


def prepare(policy: Policy) -> None:
    """Give a model the attention it is computed with, and take its dropout: the policy that samples
    has none.

    Ours, or transformers' plainest, which knows all that a layer may ask for.
    """
    model, wanted = policy.base, PLAINEST if policy.one_by_one else ATTENTION
    if model.config._attn_implementation == wanted:
        return
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    with quiet():  # about models that have only one
        model.set_attn_implementation(wanted)
    model.eval()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in [
            name
            for name, value in vars(part).items()
            if "dropout" in name and isinstance(value, float)
        ]:
            setattr(part, name, 0.0)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed_attention: PackedAttention | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """What a transformers layer calls: torch's own attention, or over packed tokens ours.

    Heads come as [1, H, N, d].
    """
    unusual = [name for name in UNUSUAL if others.get(name) is not None]
    if unusual:
        raise ValueError(f"its attention needs {' and '.join(unusual)}, which is not computed here")
    if packed_attention is None:
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            sliding_window=sliding_window,
            **others,
        )
    _check_window(module, sliding_window)
    query_NHd, key_NHd, value_NHd = (heads[0].transpose(0, 1) for heads in (query, key, value))
    mixed_NHd = packed_attention(query_NHd, key_NHd, value_NHd, scaling, sliding_window)
    return mixed_NHd[None], None


def _check_window(module: nn.Module, window: int | None) -> None:
    """Refuse a layer that sees only a part of what is before it, and does not say which: ours is
    not given transformers' mask.
    """
    config = getattr(module, "config", None)
    kinds, number = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and number is not None:
        sees_all = kinds[number] == "full_attention"
        is_told = kinds[number] == "sliding_attention" and window is not None
    else:
        sees_all = not getattr(config, "sliding_window", None)
        is_told = window is not None
    if not sees_all and not is_told:
        raise ValueError("its attention has a window that it does not tell")
