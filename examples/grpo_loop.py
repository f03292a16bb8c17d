"""The whole method in one file, for reading: two models learn from what either sampled (F-TIS).

GRPO, as known: sample a group of G completions per problem, A = (r - mean) / std within the group,
and raise A·log p of every token, with the ratio p/q to the model that sampled clipped to 1 ± e.
Here it differs in five places:

1. Two different models sample, each its own problems, and put their groups on one log: tokens,
   log q of each, rewards. Each trains on the whole log, so half of its batch is foreign.
2. The ratio p/q is a weight without gradient, min(p/q, C): it corrects for who sampled, and no
   foreign token can take the batch over.
3. A completion with A <= 0 whose KL estimate is g or more is dropped: pushing down what the learner
   would never say does harm. It still counts in its group's mean and std and in the denominator.
4. The gradient comes from R = p / stopgrad(p), which is 1; GRPO's clip acts on R, and never binds.
5. There is no KL to a reference model.

    loss = -(1/B) sum_i (1/|a_i|) sum_t min(p/q, C) · min(R·A_i, clip(R, 1-e, 1+e)·A_i)
    over the i that are kept

Own groups take the same path: there p = q, the weight is 1, the KL is 0 and nothing is dropped.
Run it with `python examples/grpo_loop.py`. Tensors end in their axes: B completion (the G of one
problem side by side), T completion token, S any token, V vocabulary, P problem, G in group.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from statistics import fmean as mean

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from motley.models.tiny import tiny_model, tiny_vocabulary
from motley.records import Problem
from motley.tasks import Split
from motley.tasks.digits import Digits, DigitsConfig

SEED = 0
ROUNDS = 60
EVERY = 5  # rounds between two printed lines
PROBLEMS = 12  # per model and round
G = 8  # completions per problem
C = 2.0  # most a token may weigh
KL_LIMIT = 50.0  # the paper's g
CLIP = 0.2  # the paper's e
LR = 1e-4
MAX_TOKENS = 5  # three digits and the end token, and one to spare
WARM_SUCCESS = 0.2  # probability of the right answer at which the warm start ends
MODELS = ("0.3m", "1m")  # 3 layers of width 96, 4 layers of width 160
STD_EPSILON = 1e-4
MAX_LOG_RATIO = 60.0  # exp(60) still fits in float32

TASK = Digits(DigitsConfig(kinds=("sort",), levels=(3,)))  # "sort 718=" -> "178"; 5 tokens each
VOCABULARY = tiny_vocabulary()


@dataclass(frozen=True)
class Group:
    """What is shared: all completions of one problem by one model."""

    sender: str
    problem: Problem
    completion_GT: Tensor  # token ids; what stands after the end token is masked
    logq_GT: Tensor  # the sampler's log-prob of each token
    mask_GT: Tensor  # True = a completion token, the end token included
    reward_G: Tensor


@dataclass
class Peer:
    name: str
    model: LlamaForCausalLM
    optimiser: torch.optim.Adam
    cursor: int = 0  # how far this peer has read the log
    rewards: list[float] = field(default_factory=list)  # of the rounds since the last printed line


@dataclass(frozen=True)
class Line:
    """What is printed of one peer."""

    round: int
    peer: str
    reward: float  # mean of its own samples since the last line
    loss: float
    kept: float  # share of the foreign completions that passed the filter
    weight: float  # mean of those of foreign completions
    heldout: float  # accuracy


def prompts_of(problems: list[Problem]) -> Tensor:
    return torch.tensor([VOCABULARY.encode(p.prompt) for p in problems])


def up_to_end(completion_BT: Tensor) -> Tensor:
    """mask_BT: True for every token up to the first end token, which counts."""
    ends_BT = completion_BT == VOCABULARY.end_id
    return ends_BT.cumsum(1) - ends_BT.long() == 0


@torch.no_grad()
def sample(
    model: LlamaForCausalLM, problems: list[Problem], num_each: int, rng: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Completions and their log-probs, at temperature 1; without an rng, the best tokens."""
    token_BS = prompts_of(problems).repeat_interleave(num_each, 0)
    logqs = []
    for _ in range(MAX_TOKENS):
        logq_BV = model(token_BS).logits[:, -1].log_softmax(-1)
        best_B1 = logq_BV.argmax(-1, keepdim=True)
        token_B1 = torch.multinomial(logq_BV.exp(), 1, generator=rng) if rng else best_B1
        token_BS = torch.cat([token_BS, token_B1], 1)
        logqs.append(logq_BV.gather(1, token_B1))
    return token_BS[:, -MAX_TOKENS:], torch.cat(logqs, 1)


def score(model: LlamaForCausalLM, problems: list[Problem], completion_BT: Tensor) -> Tensor:
    """logp_BT, with gradient: logits at one token predict the next."""
    prompt_BS = prompts_of(problems)
    logp_BSV = model(torch.cat([prompt_BS, completion_BT], 1)).logits.log_softmax(-1)
    return logp_BSV[:, prompt_BS.shape[1] - 1 : -1].gather(2, completion_BT[..., None]).squeeze(2)


def rewards_of(problems: list[Problem], completion_BT: Tensor) -> Tensor:
    """1 where the text up to the end token is exactly the answer."""
    rows = zip(completion_BT, up_to_end(completion_BT), strict=True)
    texts = [VOCABULARY.decode(tokens[mask].tolist()) for tokens, mask in rows]
    return torch.tensor(TASK.score(problems, texts))


def group_advantages(reward_PG: Tensor) -> Tensor:
    """A = (r - mean) / (std + 1e-4) within each group, as one entry per completion."""
    centred_PG = reward_PG - reward_PG.mean(1, keepdim=True)
    return (centred_PG / (reward_PG.std(1, keepdim=True) + STD_EPSILON)).flatten()


def token_mean(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return torch.where(mask_BT, value_BT, 0.0).sum(1) / mask_BT.sum(1)


def truncated_weights(logp_BT: Tensor, logq_BT: Tensor) -> Tensor:
    """min(p/q, C), without gradient: how many times as often the learner draws the token."""
    return (logp_BT - logq_BT).detach().clamp(max=MAX_LOG_RATIO).exp().clamp(max=C)


def filter_keeps(logp_BT: Tensor, logq_BT: Tensor, mask_BT: Tensor, advantage_B: Tensor) -> Tensor:
    """A > 0 or KL < g; KL = mean_t(q/p - 1 - log q/p) is 50 if 1 of 4 is 200 times less likely."""
    log_ratio_BT = (logp_BT - logq_BT).detach()
    kl_B = token_mean((-log_ratio_BT).clamp(max=MAX_LOG_RATIO).exp() - 1 + log_ratio_BT, mask_BT)
    return (advantage_B > 0) | (kl_B < KL_LIMIT)


def ftis_loss(logp_BT: Tensor, logq_BT: Tensor, mask_BT: Tensor, advantage_B: Tensor) -> Tensor:
    """The loss of the module docstring. Only logp_BT, the learner's, carries a gradient."""
    advantage_B1 = advantage_B[:, None]
    r_BT = (logp_BT - logp_BT.detach()).exp()
    surrogate_BT = torch.minimum(r_BT * advantage_B1, r_BT.clamp(1 - CLIP, 1 + CLIP) * advantage_B1)
    value_B = token_mean(truncated_weights(logp_BT, logq_BT) * surrogate_BT, mask_BT)
    keep_B = filter_keeps(logp_BT, logq_BT, mask_BT, advantage_B)
    return -torch.where(keep_B, value_B, 0.0).sum() / len(value_B)


def sample_round(peer: Peer, log: list[Group], draw: random.Random, rng: torch.Generator) -> None:
    """The sampler half of a round: put a group per problem on the log."""
    problems = draw_problems(draw, "train", PROBLEMS)
    completion_BT, logq_BT = sample(peer.model, problems, G, rng)
    reward_B = rewards_of([p for p in problems for _ in range(G)], completion_BT)
    tensors = (completion_BT, logq_BT, up_to_end(completion_BT), reward_B)
    for i, problem in enumerate(problems):
        log.append(Group(peer.name, problem, *(part[i * G : (i + 1) * G] for part in tensors)))
    peer.rewards.append(float(reward_B.mean()))


def learn_round(peer: Peer, log: list[Group]) -> tuple[float, float, float]:
    """The learner half: a step on all groups not yet read; loss, `kept` and `weight` of a Line."""
    groups = log[peer.cursor :]
    peer.cursor = len(log)
    logq_BT = torch.cat([g.logq_GT for g in groups])
    mask_BT = torch.cat([g.mask_GT for g in groups])
    advantage_B = group_advantages(torch.stack([g.reward_G for g in groups]))
    problems = [g.problem for g in groups for _ in range(G)]
    logp_BT = score(peer.model, problems, torch.cat([g.completion_GT for g in groups]))
    loss = ftis_loss(logp_BT, logq_BT, mask_BT, advantage_B)
    step(peer, loss)
    foreign_B = torch.tensor([g.sender != peer.name for g in groups for _ in range(G)])
    keep_B = filter_keeps(logp_BT, logq_BT, mask_BT, advantage_B)
    weight_B = token_mean(truncated_weights(logp_BT, logq_BT), mask_BT)
    kept, weight = (value_B[foreign_B].float().mean() for value_B in (keep_B, weight_B))
    return float(loss.detach()), float(kept), float(weight)


def step(peer: Peer, loss: Tensor) -> None:
    peer.optimiser.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(peer.model.parameters(), 1.0)
    peer.optimiser.step()


def draw_problems(draw: random.Random, split: Split, count: int) -> list[Problem]:
    return [TASK.draw(draw, split, "sort") for _ in range(count)]


def warm_start(peer: Peer, draw: random.Random, success: float) -> None:
    """Teach right answers until they have this probability: without any there is no advantage."""
    reached = 0.0
    while reached < success:
        problems = draw_problems(draw, "train", 64)
        answers = [[*VOCABULARY.encode(p.answer), VOCABULARY.end_id] for p in problems]
        logp_BT = score(peer.model, problems, torch.tensor(answers))
        step(peer, -logp_BT.mean())
        reached = float(logp_BT.detach().sum(1).exp().mean())


def accuracy(model: LlamaForCausalLM, problems: list[Problem]) -> float:
    """Share of problems whose greedy answer is right."""
    completion_PT, _ = sample(model, problems, 1, rng=None)
    return float(rewards_of(problems, completion_PT).mean())


def main(rounds: int = ROUNDS, warm_success: float = WARM_SUCCESS) -> list[Line]:
    """Train the two models; the lines it prints."""
    draw, rng = random.Random(SEED), torch.Generator().manual_seed(SEED)
    heldout = draw_problems(random.Random("heldout"), "heldout", 128)
    peers = []
    for name in MODELS:
        model = tiny_model(name, SEED)
        peers.append(Peer(name, model, torch.optim.Adam(model.parameters(), lr=1e-3)))
        warm_start(peers[-1], draw, warm_success)
        peers[-1].optimiser = torch.optim.Adam(model.parameters(), lr=LR)
        print(f"{name:>5} after the warm start: held-out {accuracy(model, heldout):.2f}")
    print("round  peer  reward    loss  foreign kept  foreign weight  held-out")
    log, lines = list[Group](), list[Line]()
    for number in range(1, rounds + 1):
        for peer in peers:  # all sample before any learns
            sample_round(peer, log, draw, rng)
        for peer in peers:
            loss, kept, weight = learn_round(peer, log)
            if number % EVERY == 0 or number == rounds:
                reward, skill = mean(peer.rewards), accuracy(peer.model, heldout)
                peer.rewards.clear()
                lines.append(Line(number, peer.name, reward, loss, kept, weight, skill))
                print(f"{number:5} {peer.name:>5} {reward:7.2f} {loss:7.3f}", end=" ")
                print(f"{kept:13.2f} {weight:15.2f} {skill:9.2f}")
    return lines


if __name__ == "__main__":
    main()
