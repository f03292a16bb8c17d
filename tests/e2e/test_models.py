"""A pretrained model in a crew: everything the tiny ones do, with SmolLM2-135M on a CPU."""

from __future__ import annotations

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from motley.config import CrewConfig, parse_config
from motley.runs.building import trained_policies
from motley.runs.conformance import check_crew
from motley.runs.evaluation import greedy_answers, mean_by_kind
from motley.runs.folder import newest_checkpoint
from motley.runs.local import LocalCrew
from motley.runs.metrics import read_metrics

pytestmark = [pytest.mark.models, pytest.mark.slow]

CREW = """
[crew]
name = "real"
task = "mixture"
objective = "uplift"
rounds = 2
problems_per_round = 4
group_size = 4

[task.sums]
task = "reasoning_gym:chain_sum"
min_terms = 2
max_terms = 2
min_digits = 1
max_digits = 1
ood = { min_digits = 2, max_digits = 2 }

[task.common]
task = "reasoning_gym:gcd"
min_numbers = 2
max_numbers = 2
min_value = 2
max_value = 12

[prompt]
shots = 2
stop = "\\n"

[sampling]
max_tokens = 6

[evaluate]
every = 2
problems = 2

[learning]
lr = 1e-5

[[peer]]
name = "whole"
model = "smollm2-135m"

[[peer]]
name = "adapter"
model = "smollm2-135m"
train = { lora = { rank = 4 } }
lr = 1e-4
"""


@pytest.fixture(scope="module")
def config(smollm2: str) -> CrewConfig:
    return parse_config(CREW)


@pytest.fixture(scope="module")
def crew(config: CrewConfig, tmp_path_factory: pytest.TempPathFactory) -> LocalCrew:
    """Two rounds, with a stop and a start between them."""
    folder = tmp_path_factory.mktemp("real") / "run"
    stopped = LocalCrew.start(config, folder)
    next(stopped.rounds())
    stopped.save()
    crew = LocalCrew.resume(folder)
    for _ in crew.rounds():
        pass
    return crew


def test_a_whole_model_and_an_adapter_learn_from_each_other(crew: LocalCrew) -> None:
    lines = [line for line in read_metrics(crew.folder) if line.round]
    assert [(line.round, line.peer) for line in lines] == [
        (1, "whole"),
        (1, "adapter"),
        (2, "whole"),
        (2, "adapter"),
    ]
    assert all(set(line.senders) == {"whole", "adapter"} and not line.refused for line in lines)
    assert all(line.num_scored > 0 and line.grad_norm > 0 for line in lines)
    first_round = lines[0].senders["whole"]
    # own rollouts, with the weights that made them
    assert first_round.ratio.mean == pytest.approx(1, abs=1e-3)
    assert set(lines[-1].heldout) == {"sums", "common"}
    assert set(lines[-1].ood) == {"sums"}


def test_what_trains_has_changed_and_nothing_else(crew: LocalCrew, smollm2: str) -> None:
    from motley.models.sources import find, read_model

    before = dict(read_model(find(smollm2)).named_parameters())
    whole, adapter = (p.learner.policy for p in crew.peers)
    assert any(not torch.equal(p, before[name]) for name, p in whole.base.named_parameters())
    frozen = {
        name.replace(".base_layer", ""): p
        for name, p in adapter.base.named_parameters()
        if "lora_" not in name
    }
    assert all(torch.equal(p, before[name]) for name, p in frozen.items())
    assert any(bool(p.detach().any()) for name, p in adapter.trained() if "lora_B" in name)


def test_checkpoints_are_ordinary_folders(crew: LocalCrew) -> None:
    folder = newest_checkpoint(crew.folder)
    whole, adapter = crew.peers
    ids = torch.tensor(
        [whole.learner.policy.vocabulary.encode("Question: What is 3 + 4?\nAnswer:")]
    )
    for peer, loader in ((whole, AutoModelForCausalLM), (adapter, AutoPeftModelForCausalLM)):
        loaded = loader.from_pretrained(folder / peer.me.name / "model")
        with torch.no_grad():
            assert torch.allclose(
                loaded(input_ids=ids).logits,
                peer.learner.policy.model(input_ids=ids).logits,
                atol=1e-4,
            )
    assert AutoTokenizer.from_pretrained(folder / "whole" / "model").chat_template


def test_a_run_is_read_again_with_the_same_skills(crew: LocalCrew) -> None:
    from motley.engines import torch_engine
    from motley.tasks import evaluation_set

    task = crew.peers[0].half.task
    problems = evaluation_set(task, "heldout", crew.config.evaluate.problems)
    last = {line.peer: line.heldout for line in read_metrics(crew.folder) if line.round == 2}
    for name, policy in trained_policies(crew.folder).items():
        answers = greedy_answers(
            torch_engine(policy), policy.prompts, task, problems, crew.config.sampling
        )
        assert mean_by_kind(answers) == last[name]


def test_the_engine_reports_the_trainers_logprobs(config: CrewConfig) -> None:
    rows = check_crew(config).rows
    assert {row["result"] for row in rows} == {"ok"}
    assert [row["fits"] for row in rows[1:]] == 2 * ["any", "sampled, full", "sampled", "sampled"]
