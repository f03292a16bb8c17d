"""Causal architectures of transformers as tiny models with random weights, and what becomes of each
in Motley: the table of docs/models.md.

`python tests/families.py` tries all of them and writes the table.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fakes import small_sizes, write_task
from motley.config import CrewConfig, parse_config
from motley.engines import TorchEngine
from motley.engines.even import EvenEngine
from motley.models.tiny import tiny_vocabulary
from motley.peers.peer import Peer
from motley.reports.export import export_model
from motley.runs.building import trained_policies
from motley.runs.local import LocalCrew

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- families -->\n", "<!-- families end -->\n"
HEAD = "| `model_type` | training | sampling |\n|---|---|---|\n"

ROTATED: dict[str, Any] = {"head_dim": 8}
WINDOWED: dict[str, Any] = ROTATED | {
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "shared_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
COMPRESSED: dict[str, Any] = EXPERTS | {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
OLD: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
LINEAR: dict[str, Any] = ROTATED | {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

# what a configuration needs besides `small_sizes`; ... is what it does not know
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": ROTATED,
    "gemma3_text": WINDOWED | {"query_pre_attn_scalar": 16},
    "apertus": {},
    "arcee": {},
    "bert": {},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "bitnet": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "codegen": OLD | {"n_ctx": 64, "rotary_dim": 4},
    "cohere": {"logit_scale": 0.25},
    "cohere2": WINDOWED | {"logit_scale": 0.25},
    "deepseek_v2": COMPRESSED,
    "deepseek_v3": COMPRESSED,
    "dots1": EXPERTS | ROTATED,
    "ernie4_5": ROTATED,
    "ernie4_5_moe": EXPERTS | {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    "exaone4": WINDOWED,
    "falcon": {},
    "falcon_h1": MAMBA | ROTATED | {"mamba_d_ssm": 32, "mamba_d_head": 8},
    "gemma": ROTATED,
    "gemma2": WINDOWED | {"query_pre_attn_scalar": 16},
    "glm": ROTATED,
    "glm4": ROTATED,
    "glm4_moe": EXPERTS | ROTATED,
    "gpt2": OLD,
    "gpt_bigcode": OLD,
    "gpt_neo": {
        "num_heads": 4,
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
    },
    "gpt_neox": {},
    "gpt_oss": EXPERTS | WINDOWED,
    "gptj": OLD | {"rotary_dim": 4},
    "granite": {"logits_scaling": 8.0},
    "granitemoe": EXPERTS,
    "granitemoehybrid": EXPERTS | MAMBA | {"layer_types": ["mamba", "attention"]},
    "helium": ROTATED,
    "jamba": EXPERTS
    | {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 40},
    "llama4_text": EXPERTS
    | ROTATED
    | {
        "intermediate_size_mlp": 40,
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 16,
        "moe_layers": [1],
    },
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "minimax": EXPERTS
    | ROTATED
    | {"layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    "mixtral": EXPERTS,
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "expansion_ratio": 2},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 4, "layer_types": WINDOWED["layer_types"]},
    "olmoe": EXPERTS,
    "opt": {"ffn_dim": 40, "word_embed_proj_dim": 32},
    "phi": {},
    "phi3": {},
    "phimoe": EXPERTS,
    "qwen2_moe": EXPERTS,
    "qwen3_5_text": LINEAR,
    "qwen3_moe": EXPERTS | ROTATED,
    "qwen3_next": EXPERTS | LINEAR,
    "reformer": {"attn_layers": ["local", "local"], "axial_pos_embds": False, "is_decoder": True},
    "rwkv": {"attention_hidden_size": 32, "context_length": 64},
    "seed_oss": ROTATED,
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {},
    "starcoder2": {},
    "xglm": {"d_model": 32, "attention_heads": 4, "ffn_dim": 40},
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 40}
    | {"max_position_embeddings": ...},
    "zamba2": {
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "chunk_size": 8,
        "attention_head_dim": 16,
        "layers_block_type": ["mamba", "hybrid"],
        "num_mem_blocks": 1,
        "adapter_rank": 4,
    },
}


def family_model(kind: str, seed: int = 0, sizes: dict[str, Any] | None = None) -> PreTrainedModel:
    """A tiny model; norms and biases away from where they start."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        given = small_sizes() | FAMILIES[kind] | (sizes or {})
        config = CONFIG_MAPPING[kind](
            **{name: one for name, one in given.items() if one is not ...}
        )
        model = AutoModelForCausalLM.from_config(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def write_family(kind: str, folder: Path) -> Path:
    family_model(kind).save_pretrained(folder)
    tiny_vocabulary().save(folder)
    return folder


def family_crew(model: Path, folder: Path, train: str = "") -> CrewConfig:
    """Two rounds of one peer, on the dense task that `write_task` wrote into the folder."""
    return parse_config(f"""
[crew]
name = "one"
task = "spread_reward:spread"
rounds = 2
group_size = 4
problems_per_round = 2
objective = "ftis"
[task]
file = "{folder}/problems.jsonl"
[sampling]
max_tokens = 4
[learning]
lr = 1e-2
checkpoint_every = 1
[evaluate]
every = 9
problems = 1
[[peer]]
name = "it"
model = "{model}"
device = "cpu"
{train}
""")


def fate(kind: str, place: Path) -> str:
    """A row of the table: how a family trains and samples, or why it is refused.

    Whatever trains is resumed, and exported; what differs then is an error.
    """
    model = write_family(kind, place / "model")
    config = family_crew(model, place)
    try:
        crew = LocalCrew.start(config, place / "run")
    except ValueError as error:
        reason = str(error).replace(str(model), "MODEL").split("; ")[0]
        return f"| `{kind}` | refused: {reason} | |"
    check_comes_back(crew, place)
    return f"| `{kind}` | {training_of(crew.peers[0])} | {sampling_of(crew.peers[0])} |"


def check_comes_back(crew: LocalCrew, place: Path) -> None:
    """Its second round must be the same after a stop, to the bit; its export must answer alike."""
    rounds = crew.rounds()
    next(rounds)
    shutil.copytree(crew.folder, place / "stopped")
    next(rounds)
    for _ in LocalCrew.resume(place / "stopped").rounds():
        pass
    went_on, resumed = (
        {path.name: path.read_bytes() for path in newest.rglob("*.safetensors")}
        for newest in (
            folder / "checkpoints" / "round-000002" for folder in (crew.folder, place / "stopped")
        )
    )
    assert went_on == resumed, "the second round differs after a stop"
    before = (place / "stopped" / "checkpoints" / "round-000001" / "it").rglob("*.safetensors")
    assert all(path.read_bytes() != went_on[path.name] for path in before), "nothing was learned"
    (policy,) = trained_policies(crew.folder).values()
    out = export_model(crew.folder, "it", place / "out", merge=policy.is_adapted)
    exported = AutoModelForCausalLM.from_pretrained(out).eval()
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    with torch.no_grad():
        expected, found = (one.eval()(input_ids=ids).logits for one in (policy.model, exported))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def training_of(peer: Peer) -> str:
    policy = peer.learner.policy
    if policy.one_by_one:
        return "its own code, one sequence at a time"
    return "ours" if isinstance(peer.half.engine, TorchEngine) else "its own code, packed"


def sampling_of(peer: Peer) -> str:
    engine = peer.half.engine
    if isinstance(engine, TorchEngine):
        return "ours"
    if isinstance(engine, EvenEngine):
        return f"its own code, one prompt at a time{'' if engine.caches else ', without a cache'}"
    return "its own code"


def table(rows: Iterable[str]) -> str:
    return HEAD + "".join(f"{row}\n" for row in rows)


def table_of_page() -> str:
    return PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]


def main() -> None:
    only, rows = sys.argv[1:], []
    with tempfile.TemporaryDirectory() as folder:
        for kind in only or FAMILIES:
            place = Path(folder) / kind
            place.mkdir()
            write_task(place)
            sys.path.insert(0, str(place))
            rows.append(fate(kind, place))
            print(rows[-1], flush=True)
            shutil.rmtree(place)
    if only:
        return
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(before + BEGIN + table(rows) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
