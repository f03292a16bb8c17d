from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from motley.benchmarks.models import SMOLLM2, Texts, build, cache_bytes, num_parameters
from motley.config import PeerConfig
from motley.engines import torch_engine
from motley.models.opening import initial_policy
from motley.models.vocabulary import Vocabulary
from motley.records import Problem, Sampling


def exact(vocabulary: Vocabulary, length: int) -> Texts:
    made = Texts.draw(vocabulary, 20, length)
    assert [vocabulary.encode(text) for text in made.texts] == [list(ids) for ids in made.ids]
    assert {len(ids) for ids in made.ids} == {length}
    assert len(set(made.ids)) == 20
    return made


def test_prompts_are_exactly_as_long_as_asked() -> None:
    policy = build("tiny:0.3m")
    made = exact(policy.vocabulary, 9)
    assert [policy.prompts.ids(Problem(prompt=text)) for text in made.texts] == made.ids
    assert Texts.draw(policy.vocabulary, 20, 9, seed=1) != made


@pytest.mark.models
def test_prompts_of_a_real_vocabulary_are_the_ones_that_others_read(
    smollm2: str, tmp_path: Path
) -> None:
    policy = initial_policy(PeerConfig(name="one", model=smollm2), seed=0)
    made = exact(policy.vocabulary, 96)
    policy.vocabulary.save(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)(made.texts)["input_ids"] == [
        list(ids) for ids in made.ids
    ]
    assert smollm2 == SMOLLM2


def test_answers_never_end() -> None:
    policy = build("tiny:0.3m")
    end_id = initial_policy(PeerConfig(name="one", model="tiny:0.3m"), seed=0).vocabulary.end_id
    with torch.no_grad():  # every token is as likely, the one that would end an answer too
        policy.base.get_output_embeddings().weight.zero_()
    made = torch_engine(policy).sample([(3, 4)] * 50, 4, Sampling(max_tokens=6), seed=0)
    assert {len(c.tokens) for row in made for c in row} == {6}
    assert any(end_id in c.tokens[:-1] for row in made for c in row)


def test_models_share_nothing() -> None:
    one, other = build("tiny:0.3m"), build("tiny:0.3m")
    with torch.no_grad():
        next(one.model.parameters()).zero_()
    assert float(next(other.model.parameters()).abs().sum().detach()) > 0


def test_what_a_step_must_read() -> None:
    policy = build("tiny:0.3m")  # hidden 96, 3 layers, feed-forward 256, 3 heads of 32
    vocabulary = policy.vocabulary.size
    assert (
        num_parameters(policy) == vocabulary * 96 + 3 * (4 * 96 * 96 + 3 * 96 * 256 + 2 * 96) + 96
    )
    assert cache_bytes(policy) == 3 * 2 * 96 * 4
