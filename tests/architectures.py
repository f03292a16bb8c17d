"""Small models of other architectures than Llama, and a small tokenizer that writes text, as model
folders on the disk.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from fakes import small_sizes
from motley.config import Lora, TrainPart
from motley.models.policy import Policy, with_trained_part
from motley.models.tiny import tiny_vocabulary

WINDOW = 4  # shorter than most of the ragged sequences
ARCHITECTURES: dict[str, Callable[..., PretrainedConfig]] = {  # called with what is to be otherwise
    "llama with biases": lambda **others: LlamaConfig(**small_sizes(attention_bias=True) | others),
    "qwen2": lambda **others: Qwen2Config(**small_sizes() | others),
    "qwen3": lambda **others: Qwen3Config(**small_sizes(head_dim=8) | others),
    "gemma3": lambda **others: Gemma3TextConfig(
        **small_sizes(
            head_dim=8,
            query_pre_attn_scalar=16,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
        )
        | others
    ),
    "mistral": lambda **others: MistralConfig(**small_sizes(sliding_window=WINDOW) | others),
    "gpt2": lambda **others: GPT2Config(
        **{
            "vocab_size": tiny_vocabulary().size,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "initializer_range": 0.2,
        }
        | {"bos_token_id": None, "eos_token_id": tiny_vocabulary().end_id}
        | {name.replace("num_hidden_layers", "n_layer"): value for name, value in others.items()}
    ),
    "opt": lambda **others: OPTConfig(
        **small_sizes(ffn_dim=40, word_embed_proj_dim=32, dropout=0.1) | others
    ),
}


def own_code_policy(kind: str, train: str | TrainPart = "full", seed: int = 0) -> Policy:
    """A small model of another architecture; norms, biases and adapters away from where they
    start.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(ARCHITECTURES[kind]()).float().eval()
        policy = with_trained_part(Policy(model, tiny_vocabulary()), train, seed)
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if parameter.ndim == 1 or "lora_B" in name:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return policy


def reference_policy(policy: Policy) -> Policy:
    """The same model with transformers' plainest attention and nothing of ours in it."""
    copied = dataclasses.replace(policy, model=copy.deepcopy(policy.model))
    copied.base.set_attn_implementation("eager")
    copied.model.eval()
    return copied


TRAINS = {"full": "full", "lora": TrainPart(lora=Lora(rank=4))}


BEGIN, END, TURN_END = "<s>", "</s>", "<|im_end|>"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + "
    "'<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def text_tokenizer(
    template: str | None = CHATML, begins: bool = True, size: int = 320
) -> PreTrainedTokenizerFast:
    """Byte-level BPE: spells everything; a begin token before every text where it `begins`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # the last one transformers would add to Qwen's by itself
    special = [BEGIN, END, "<|im_start|>", TURN_END, "<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [
            "sort 21=12\n\n",
            "reverse 12= 21\n\n",
            "Question: 1\nAnswer: 2\n\n",
            "user assistant system",
        ]
        * 9,
        trainer,
    )
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END, chat_template=template
    )


def write_model(
    folder: Path,
    kind: str = "qwen2",
    tokenizer: PreTrainedTokenizerFast | None = None,
    layers: int = 2,
    seed: int = 0,
    ends: list[int] | None = None,
    **sizes: object,
) -> Path:
    """An ordinary model folder; its values are random."""
    tokenizer = tokenizer or text_tokenizer()
    eos = tokenizer.eos_token_id if ends is None else ends
    config = ARCHITECTURES[kind](
        **{
            "vocab_size": len(tokenizer),
            "num_hidden_layers": layers,
            "eos_token_id": eos,
            "pad_token_id": None,
            **sizes,
        }
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).float()
    model.generation_config.eos_token_id = eos
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
