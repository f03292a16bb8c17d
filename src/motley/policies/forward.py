"""Log-probs of completion tokens, with gradient.

Differs from calling the transformers model on padded rows: a prompt shared by a group is computed
once (on a CPU also what its short completions begin with alike), linear layers see no padding, and
the vocabulary projection sees only the positions that predict a completion token. Owns no batching:
`Packed` is built by learning.batches.

Models that `decoder` knows have a forward of their own: a plain one here, and the same in a GPU's
half types in `fused`. Any other runs its own code, with only the attention replaced by ours.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from motley.policies.attention import attend
from motley.policies.decoder import Block, Decoder, why_unknown
from motley.policies.hardware import runs_kernels
from motley.policies.logprobs import Scores, score_hidden
from motley.policies.merged import Merged
from motley.policies.packed import Packed
from motley.policies.parts import rotate
from motley.policies.policy import Policy

ATTENTION = "motley"  # what transformers knows our attention by
# what some layers ask of attention, and neither torch's nor ours does
UNUSUAL = ("softcap", "s_aux", "position_bias")


def score(policy: Policy, packed: Packed) -> Scores:
    """Score every completion token of a packed batch."""
    packed = packed.to(policy.device)
    with torch.cuda.device_of(packed.token_N):  # where Triton starts its kernels
        return score_hidden(
            predicting_states(policy, packed), policy.base.get_output_embeddings(), packed
        )


def predicting_states(policy: Policy, packed: Packed) -> Tensor:
    """[M, D], the hidden state that predicts each target, in the dtype that it is projected to the
    vocabulary in.
    """
    if policy.device.type == "cpu" and not is_fused(policy):
        merged = Merged.of(packed)
        return hidden_states(policy, merged).index_select(0, merged.predictor_M).float()
    # index_select would add up its gradient on a GPU in any order
    hidden_MD = hidden_states(policy, packed)[packed.predictor_M]
    return hidden_MD.to(policy.dtype) if is_fused(policy) else hidden_MD.float()


def hidden_states(policy: Policy, packed: Packed | Merged) -> Tensor:
    """Final hidden state of every packed token.

    Products in the policy's dtype, sums and norms in float32.
    """
    model = policy.base
    if isinstance(packed, Packed) and is_fused(policy) and not why_unknown(model):
        from motley.policies.fused import fused_states

        return fused_states(
            policy.decoder,
            packed,
            policy.dtype,
            policy.gradient_checkpointing and torch.is_grad_enabled(),
        )
    with torch.autocast(
        policy.device.type, dtype=policy.dtype, enabled=policy.dtype != torch.float32
    ):
        if why_unknown(model):
            return _by_its_own_code(model, packed, policy.gradient_checkpointing)
        return _by_blocks(
            policy.decoder, packed, policy.gradient_checkpointing and torch.is_grad_enabled()
        )


def is_fused(policy: Policy) -> bool:
    """Whether it computes in a half type by our kernels."""
    return policy.dtype != torch.float32 and runs_kernels(policy.device)


def _by_blocks(decoder: Decoder, packed: Packed | Merged, checkpointed: bool) -> Tensor:
    hidden_ND = decoder.embed(packed.token_N)
    rotations = decoder.rotations(packed.position_N)
    for block in decoder.blocks:
        given = (decoder, block, hidden_ND, *rotations[block.rotation], packed)
        hidden_ND = (
            checkpoint(_layer, *given, use_reentrant=False) if checkpointed else _layer(*given)
        )
    return decoder.norm(hidden_ND)


def _layer(
    decoder: Decoder,
    block: Block,
    hidden_ND: Tensor,
    cos_N1d: Tensor,
    sin_N1d: Tensor,
    packed: Packed | Merged,
) -> Tensor:
    normed_ND = block.attention_norm(hidden_ND)
    query, key, value = (_heads(linear(normed_ND), decoder.head_dim) for linear in block.qkv)
    query = query if block.query_norm is None else block.query_norm(query)
    key = key if block.key_norm is None else block.key_norm(key)
    query, key = (rotate(heads.float(), cos_N1d, sin_N1d).to(value.dtype) for heads in (query, key))
    mixed_ND = block.out(attend(query, key, value, packed, block.scaling, block.window).flatten(1))
    hidden_ND = hidden_ND + (
        mixed_ND if block.after_attention is None else block.after_attention(mixed_ND)
    )
    normed_ND = block.mlp_norm(hidden_ND)
    gate, up = (linear(normed_ND) for linear in block.gate_up)
    made_ND = block.down(decoder.act(gate) * up)
    return hidden_ND + (made_ND if block.after_mlp is None else block.after_mlp(made_ND))


def _by_its_own_code(model: PreTrainedModel, packed: Packed | Merged, checkpointed: bool) -> Tensor:
    """The model's forward on one row of all packed tokens.

    A mask of one element keeps transformers from making one of N x N.
    """
    prepare(model)
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
        packed=packed,
    )
    hidden_ND: Tensor = output[0][0]
    return hidden_ND


def prepare(model: PreTrainedModel) -> None:
    """Give a model our attention, and take its dropout: log-probs must be those of the policy that
    samples.
    """
    if model.config._attn_implementation == ATTENTION:
        return
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)
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
    packed: Packed | Merged | None = None,
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
    if packed is None:
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
    query_NHd, key_NHd, value_NHd = (heads[0].transpose(0, 1) for heads in (query, key, value))
    mixed_NHd = attend(query_NHd, key_NHd, value_NHd, packed, scaling, sliding_window)
    return mixed_NHd[None], None


def _heads(flat_N: Tensor, head_dim: int) -> Tensor:
    return flat_N.view(len(flat_N), -1, head_dim)
