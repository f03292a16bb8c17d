"""Small stand-ins: a clock that stands still, tiny policies, groups made by hand, a crew whose
every group has something to learn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from motley.clock import RealClock
from motley.config import CrewConfig, Lora, PeerConfig, TrainPart, parse_config
from motley.exchange import Entry, Sealed, encode, pack, unpack
from motley.learning.batches import ToScore
from motley.learning.select import Candidate
from motley.models.opening import initial_policy
from motley.models.policy import Policy, with_trained_part
from motley.models.tiny import tiny_vocabulary
from motley.records import FIRST_PREVIOUS, Content, Group, Origin, Problem, Rollout, Sampling, Stamp
from motley.trust import Identity


class FixedClock(RealClock):
    """Stamps are always of the same moment; durations are real."""

    def now_s(self) -> float:
        return 1000.0


def tiny_policy(train: str | TrainPart = "full", seed: int = 0) -> Policy:
    policy = initial_policy(PeerConfig(name="one", model="tiny:0.3m"), seed)
    return with_trained_part(policy, train, seed)


def lora_policy(rank: int = 4, seed: int = 0) -> Policy:
    """A LoRA policy whose adapters already act: B is not zero."""
    return _acting(tiny_policy(TrainPart(lora=Lora(rank=rank)), seed), seed)


def _acting(policy: Policy, seed: int) -> Policy:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.trained():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return policy


def four_bit_policy(seed: int = 0, bits: int = 4, **lora: Any) -> Policy:
    """Four heads over two key-value heads, with biases; its adapters act beside 4 bits."""
    model = small_llama(seed, hidden_size=64, intermediate_size=128, attention_bias=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.copy_(torch.linspace(-0.2, 0.3, len(parameter)))
    train = TrainPart(lora=Lora(rank=4, bits=bits, **lora))
    return _acting(with_trained_part(Policy(model, tiny_vocabulary()), train, seed), seed)


def small_sizes(**others: object) -> dict[str, object]:
    """Of a small model's configuration: four heads over two key-value heads, two layers."""
    vocabulary = tiny_vocabulary()
    common = {
        "vocab_size": vocabulary.size,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": vocabulary.end_id,
        "pad_token_id": vocabulary.pad_id,
        "initializer_range": 0.2,
    }
    return common | others


def small_llama(seed: int = 0, **others: object) -> LlamaForCausalLM:
    """With an untied head, in float32; `others` are of its configuration."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _llama(**others)


def _llama(**others: object) -> LlamaForCausalLM:
    sizes = small_sizes(tie_word_embeddings=False) | others
    return LlamaForCausalLM(LlamaConfig(**sizes)).float()


def grouped_query_policy(seed: int = 0) -> Policy:
    """Four heads over two key-value heads, an untied head, norm scales that are not one."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _llama()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
    return Policy(model, tiny_vocabulary())


POLICIES = {
    "full": tiny_policy,
    "lora": lora_policy,
    "grouped": grouped_query_policy,
    "four bits": four_bit_policy,
}


def reference_logp(
    policy: Policy, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs [T] by transformers' own forward on this one sequence."""
    return (
        reference_distribution(policy, prompt, tokens, temperature)
        .gather(1, torch.tensor(tokens)[:, None])
        .squeeze(1)
    )


def reference_distribution(
    policy: Policy, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs [T, V] of everything that could have stood at each place."""
    logits = policy.model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0]
    return torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, -1)


def ragged_sequences(seed: int = 0, temperatures: Sequence[float] = (1.0,)) -> list[ToScore]:
    """Prompts of 1 to 6 tokens with 1 to 5 completions of 1 to 6 tokens, in mixed order."""
    generator = torch.Generator().manual_seed(seed)
    number = lambda low, high: int(torch.randint(low, high + 1, (), generator=generator))
    vocabulary = tiny_vocabulary()
    prompts = [
        tuple(number(3, vocabulary.size - 1) for _ in range(length)) for length in (1, 3, 3, 6)
    ]
    wanted = [
        (prompt, number(1, 6))
        for prompt, count in zip(prompts, (5, 2, 1, 4), strict=True)
        for _ in range(count)
    ]
    order = torch.randperm(len(wanted), generator=generator).tolist()
    return [
        ToScore(
            row=row,
            prompt=wanted[place][0],
            tokens=tuple(number(1, vocabulary.size - 1) for _ in range(wanted[place][1])),
            temperature=temperatures[row % len(temperatures)],
        )
        for row, place in enumerate(order)
    ]


PROBLEM = Problem(kind="reverse", prompt="reverse 12=", answer="21")


def rollout(
    tokens: Sequence[int] = (11, 12, 1), reward: float = 1.0, logprob: float = -1.0
) -> Rollout:
    return Rollout(
        tokens=tuple(tokens), logprobs=(logprob,) * len(tokens), reward=reward, ending="stop"
    )


def group(
    peer: str = "a",
    round: int = 0,
    slot: int = 0,
    rollouts: Sequence[Rollout] | None = None,
    problem: Problem = PROBLEM,
    crew: str = "crew",
    vocabulary: str = "",
    sampling: Sampling = Sampling(),
) -> Group:
    return Group(
        crew=crew,
        problem=problem.id,
        round=round,
        slot=slot,
        origin=Origin(
            peer=peer,
            model="m",
            vocabulary=vocabulary or tiny_vocabulary().fingerprint,
            version=0,
            sampling=sampling,
        ),
        rollouts=tuple(rollouts or (rollout(reward=1.0), rollout(reward=0.0))),
        created_s=0.0,
    )


def identity(name: str) -> Identity:
    """The same key for the same name, everywhere."""
    return Identity.of(hashlib.sha256(name.encode()).digest())


def sealed_record(body: bytes, author: Identity) -> bytes:
    return pack(author.sign(Sealed(b"", body).signed), body)


def entry(
    content: Content,
    author: Identity,
    counter: int = 0,
    previous: bytes | Entry = FIRST_PREVIOUS,
    position: int = 1,
    lossless: bool = False,
) -> Entry:
    """A signed record where it stands.

    `previous`: the record before it in its author's chain, or that record's hash.
    """
    before = unpack(previous.record).hash if isinstance(previous, Entry) else previous
    body = encode(content, Stamp(key=author.public, counter=counter, previous=before), lossless)
    return Entry(position, content.id, sealed_record(body, author))


def candidate(
    made: Group,
    own: bool = False,
    arrived: int = 0,
    position: int = 1,
    family: str = "",
    problem: Problem = PROBLEM,
) -> Candidate:
    return Candidate(
        group=made,
        problem=problem,
        own=own,
        stranger=not own,
        family=family or made.id,
        since=arrived,
        position=position,
    )


# A crew whose reward is dense, so that without any warm start nearly every group has something to
# learn.
REWARD_MODULE = '''
def spread(prompts, completions, answer, **columns):
    """A share for every different character, and for an even length."""
    return [(len(set(text)) + (len(text) % 2 == 0)) / 10 for text in completions]


def digits(prompts, completions, answer, **columns):
    """The same of digits alone: names of special tokens, which others cannot read, pay nothing."""
    return spread(prompts, ["".join(filter(str.isdigit, c)) for c in completions], answer)
'''


def write_task(folder: Path) -> str:
    """Write problems and a reward module into a folder; the name of the module's task."""
    lines = [
        {"prompt": f"{kind} {n}=", "answer": str(n), "kind": kind}
        for kind in ("sort", "reverse")
        for n in range(10, 60)
    ]
    (folder / "problems.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "spread_reward.py").write_text(REWARD_MODULE)
    return "spread_reward:spread"


TRAIN = {
    "full": "",
    "lora": "train = { lora = { rank = 2 } }\n",
    "bits": "train = { lora = { rank = 2, bits = 4 } }\n",
    "last": 'train = { layers = "last:1" }\n',
}


def spread_crew(
    folder: Path,
    trains: Sequence[str] = ("full", "full"),
    learning: str = "",
    sampling: str = "",
    models: Sequence[str] = (),
    **crew: Any,
) -> CrewConfig:
    """A crew of tiny:0.3m peers, or of other models, named after what of them trains, on the dense
    task in `folder`.
    """
    settings = {
        "name": "spread",
        "task": "spread_reward:spread",
        "rounds": 3,
        "group_size": 4,
        "problems_per_round": 2 * len(trains),
        "objective": "ftis",
    } | crew
    peers = "".join(
        f'[[peer]]\nname = "{train}{number}"\nmodel = "{model}"\n{TRAIN[train]}'
        for number, (train, model) in enumerate(
            zip(trains, models or ["tiny:0.3m"] * len(trains), strict=True)
        )
    )
    keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    return parse_config(
        f'[crew]\n{keys}\n[task]\nfile = "{folder / "problems.jsonl"}"\n\n[sampling]\nmax_tokens '
        f"= 5\n{sampling}\n"
        f"[learning]\nlr = 2e-3\n{learning}\n[evaluate]\nevery = 2\nproblems = 2\n{peers}"
    )
