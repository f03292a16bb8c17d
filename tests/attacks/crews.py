"""Small crews to attack: nothing is warmed, so nothing takes long."""

from __future__ import annotations

from collections.abc import Sequence

from motley.attacks.attack import Scene, Stage
from motley.attacks.suite import stage_of
from motley.config import CrewConfig, parse_config
from motley.models.policy import Policy
from motley.records import Group, Origin, Problem, Rollout
from motley.tasks import assign

TEXT = """
[crew]
name = "besieged"
task = "digits"
objective = "{objective}"
layout = "{layout}"
rounds = {rounds}
problems_per_round = {problems}
group_size = {size}
[task]
kinds = ["reverse"]
levels = [2]
form = "{form}"
[sampling]
max_tokens = {max_tokens}
[evaluate]
every = 100
problems = 4
"""
PEER = '[[peer]]\nname = "{name}"\nmodel = "tiny:0.3m"\n'


def crew_text(
    form: str = "first",
    peers: str = "abcd",
    layout: str = "vertical",
    rounds: int = 2,
    max_tokens: int = 8,
    objective: str = "ftis",
) -> str:
    problems, size = (len(peers), 4) if layout == "vertical" else (1, 2 * len(peers))
    head = TEXT.format(
        form=form,
        layout=layout,
        rounds=rounds,
        max_tokens=max_tokens,
        problems=problems,
        size=size,
        objective=objective,
    )
    return head + "".join(PEER.format(name=name) for name in peers)


def crew(form: str = "first", peers: str = "abcd", **others: object) -> CrewConfig:
    return parse_config(crew_text(form, peers, **others))


def stage(form: str = "first", **others: object) -> Stage:
    return stage_of(crew(form, **others))


def problems_of(on: Stage, round: int) -> list[Problem]:
    config = on.config
    return assign(on.task, config.crew.seed, "d", round, config.problems_per_peer)


def scene(on: Stage, policy: Policy, likeness: Policy, records: Sequence[Group] = ()) -> Scene:
    return Scene(
        me="d",
        accomplices=("d",),
        round=0,
        policy=policy,
        likeness=likeness,
        problems=lambda round: problems_of(on, round),
        records=lambda: list(records),
    )


def honest_group(on: Stage, texts: list[str], round: int = 0, peer: str = "d") -> Group:
    """What d sampled: these answers to its first problem."""
    (problem, *_) = problems_of(on, round)
    vocabulary = on.vocabulary
    rewards = on.task.score([problem] * len(texts), texts)
    rollouts = [
        Rollout(
            tokens=(*vocabulary.encode(text), vocabulary.end_id),
            logprobs=(-1.5,) * (len(vocabulary.encode(text)) + 1),
            reward=reward,
            ending="stop",
        )
        for text, reward in zip(texts, rewards, strict=True)
    ]
    return Group(
        crew="besieged",
        problem=problem.id,
        round=round,
        slot=0,
        origin=Origin(
            peer=peer,
            model="m",
            vocabulary=vocabulary.fingerprint,
            version=round,
            sampling=on.config.sampling,
        ),
        rollouts=tuple(rollouts),
        created_s=0.0,
    )
