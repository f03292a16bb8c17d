"""The engine with a stand-in for vLLM; and, where MOTLEY_VLLM_PYTHON names an interpreter that has
it, with vLLM itself.
"""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from engines import servers
from fakes import (
    POLICIES,
    grouped_query_policy,
    lora_policy,
    reference_distribution,
    small_llama,
    tiny_policy,
)
from families import family_model
from motley.config import Lora, TrainPart
from motley.config.peers import OpenAI, Vllm
from motley.engines.engine import Completion
from motley.engines.openai import OpenAIEngine
from motley.engines.vllm import VllmEngine, can_reload, quote, server_environment, write_model
from motley.models.policy import Policy, with_trained_part
from motley.models.tiny import tiny_vocabulary
from motley.records import Sampling

PROMPTS = [(5, 12, 13, 14), (6, 20), (9,), (7, 15, 15, 16, 17, 27)]
PLAIN = Sampling(max_tokens=12)
SHAPED = Sampling(max_tokens=12, temperature=0.7, top_k=20, top_p=0.9)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=torch.tensor([PROMPTS[3]])).logits


@torch.no_grad()
def disturb(policy: Policy) -> None:
    """As an optimiser step would, only larger."""
    generator = torch.Generator().manual_seed(1)
    for _, parameter in policy.trained():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


@pytest.mark.parametrize("kind", POLICIES)
def test_the_written_folder_is_the_policy_with_a_head_of_its_own(kind: str, tmp_path: Path) -> None:
    policy = POLICIES[kind]()
    write_model(policy, tmp_path)
    served = LlamaForCausalLM.from_pretrained(tmp_path)
    assert not served.config.tie_word_embeddings
    torch.testing.assert_close(logits(served), logits(policy.model), rtol=0, atol=2e-5)
    disturb(policy)
    write_model(policy, tmp_path)
    torch.testing.assert_close(
        logits(LlamaForCausalLM.from_pretrained(tmp_path)), logits(policy.model), rtol=0, atol=2e-5
    )
    assert [file.name for file in tmp_path.iterdir() if "safetensors" in file.name] == [
        "model.safetensors"
    ]


@pytest.mark.parametrize("train", ["full", TrainPart(lora=Lora(rank=2, targets=("q_proj",)))])
@pytest.mark.parametrize("kind", ["gpt_neox", "mixtral"])
def test_weights_have_the_names_that_are_on_disk(
    kind: str, train: str | TrainPart, tmp_path: Path
) -> None:
    """Which are not those in memory."""
    if kind == "gpt_neox" and train != "full":
        train = TrainPart(lora=Lora(rank=2, targets=("query_key_value",)))
    policy = with_trained_part(Policy(family_model(kind), tiny_vocabulary()), train, 0)
    policy.model.eval()
    disturb(policy)
    write_model(policy, tmp_path / "served")
    family_model(kind).save_pretrained(tmp_path / "saved")
    served, saved = (
        load_file(tmp_path / name / "model.safetensors").keys() for name in ("served", "saved")
    )
    assert served == saved
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "served").eval()
    torch.testing.assert_close(logits(model), logits(policy.model), rtol=0, atol=2e-5)


def test_adapters_on_experts_are_refused(tmp_path: Path) -> None:
    part = TrainPart(lora=Lora(rank=2))
    policy = with_trained_part(Policy(family_model("mixtral"), tiny_vocabulary()), part, 0)
    with pytest.raises(ValueError, match=r"not given adapters on experts .*; name lora targets"):
        write_model(policy, tmp_path)


def test_a_tied_head_that_vllm_always_ties_stays_tied(tmp_path: Path) -> None:
    policy = tiny_policy()
    assert can_reload(policy)
    policy.base.config.model_type = "gemma2"
    assert not can_reload(policy)
    assert can_reload(grouped_query_policy())
    write_model(policy, tmp_path)
    assert '"tie_word_embeddings": true' in (tmp_path / "config.json").read_text()


def test_the_server_sees_the_policys_gpu_and_none_of_our_packages() -> None:
    class OnGpu:
        device = torch.device("cuda:1")

    ours = {
        "PATH": "/bin",
        "PYTHONPATH": "/src",
        "CUDA_VISIBLE_DEVICES": "4,7",
        "VLLM_CPU_KVCACHE_SPACE": "9",
    }
    seen = server_environment(OnGpu(), Vllm(python="other"), ours)  # type: ignore[arg-type]
    assert seen["CUDA_VISIBLE_DEVICES"] == "7"
    assert seen["VLLM_CPU_KVCACHE_SPACE"] == "9"
    assert seen["VLLM_SERVER_DEV_MODE"] == "1"
    assert seen["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert "PYTHONPATH" not in seen
    assert server_environment(tiny_policy(), Vllm(), {"PYTHONPATH": "/src"})["PYTHONPATH"] == "/src"


def test_an_interpreter_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match="python='/nowhere/python' is no program; set it to the interpreter that has vllm",
    ):
        VllmEngine(tiny_policy(), Vllm(python="/nowhere/python"), tmp_path)
    with pytest.raises(ValueError, match="has no vllm; install it in an environment of its own"):
        VllmEngine(tiny_policy(), Vllm(), tmp_path)


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    """An interpreter that says it has vllm, and runs our server instead."""
    path = tmp_path / "python"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exit 0\nshift 2\nexec {sys.executable} {servers.__file__} '
        '"$@"\n'
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
def test_it_samples_follows_and_stops(stand_in: str, tmp_path: Path) -> None:
    policy = tiny_policy()
    with VllmEngine(policy, Vllm(python=stand_in), tmp_path) as engine:
        before = engine.sample(PROMPTS, 3, SHAPED, seed=0)
        assert engine.follows
        assert engine.sample(PROMPTS, 3, SHAPED, seed=0) == before
        disturb(policy)
        assert engine.sample(PROMPTS, 3, SHAPED, seed=0) == before
        engine.refresh()
        assert engine.sample(PROMPTS, 3, SHAPED, seed=0) != before
        with pytest.raises(ValueError, match="declared 'sampled' and the crew's 'full'"):
            engine.sample(PROMPTS, 1, Sampling(top_k=3, logprobs="full"), seed=0)
        url = engine.url
    with pytest.raises(
        ConnectionError, match="the vLLM server beside the peer failed: no server answers"
    ):
        engine.sample(PROMPTS[:1], 1, PLAIN, seed=0)
    with pytest.raises(ConnectionError):
        OpenAIEngine(policy, OpenAI(url=f"{url}/v1"), tmp_path, lambda _: None)


@pytest.mark.slow
def test_one_that_cannot_reload_is_started_anew(stand_in: str, tmp_path: Path) -> None:
    policy = tiny_policy()
    policy.base.config.model_type = "gemma2"
    with VllmEngine(policy, Vllm(python=stand_in), tmp_path) as engine:
        before, url = engine.sample(PROMPTS, 3, PLAIN, seed=0), engine.url
        disturb(policy)
        engine.refresh()
        assert engine.url != url
        assert engine.sample(PROMPTS, 3, PLAIN, seed=0) != before


@pytest.mark.slow
def test_a_server_that_does_not_start_is_quoted(stand_in: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)ended before it was ready.*I refuse\nexit status 3"):
        VllmEngine(tiny_policy(), Vllm(python=stand_in, args=("--refuse",)), tmp_path)
    with pytest.raises(TimeoutError, match=r"not ready within start_s=0.001; raise it"):
        VllmEngine(tiny_policy(), Vllm(python=stand_in, start_s=0.001), tmp_path)


def test_a_log_is_quoted_with_what_went_wrong_first() -> None:
    lines = [
        "(Worker) ERROR [a.py:1] RuntimeError: no such size",
        "(Core) ERROR [b.py:2] RuntimeError: no such size",
    ]
    lines += [f"line {i}" for i in range(50)] + [' - leaked type "x"'] * 50
    assert quote(lines) == [
        "RuntimeError: no such size",
        "...",
        *(f"line {i}" for i in range(42, 50)),
    ]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for the processes in /proc")
def test_the_server_ends_with_us_even_if_we_are_killed(stand_in: str, tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; sys.path[:0] = sys.argv[3:]\n"
        "from fakes import tiny_policy; from motley.config.peers import Vllm; from "
        "motley.engines.vllm import VllmEngine\n"
        "engine = VllmEngine(tiny_policy(), Vllm(python=sys.argv[1]), Path(sys.argv[2])); "
        "print(engine._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    tests = str(Path(__file__).parent.parent)
    with subprocess.Popen(
        [sys.executable, "-c", script, stand_in, str(tmp_path), tests], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        group = int(child.stdout.readline())
        assert members(group) >= 2
        child.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 300
    while members(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert members(group) == 0


def members(group: int) -> int:
    """Living processes of a process group."""
    states = [Path(f"/proc/{pid}/stat") for pid in os.listdir("/proc") if pid.isdigit()]
    return sum(_is_member(stat, group) for stat in states)


def _is_member(stat: Path, group: int) -> bool:
    try:
        state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
    except OSError:  # it ended meanwhile
        return False
    return int(process_group) == group and state != "Z"


# vLLM itself

PYTHON = os.environ.get("MOTLEY_VLLM_PYTHON", "")
real = [
    pytest.mark.slow,
    pytest.mark.models,
    pytest.mark.skipif(not PYTHON, reason="MOTLEY_VLLM_PYTHON names no interpreter that has vllm"),
]
TOLERANCE = 1e-3


def medium_policy(tied: bool) -> Policy:
    """Larger than the others, with grouped heads, of a size that vLLM can do on a CPU: multiples of
    32.
    """
    model = small_llama(
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        pad_token_id=None,
        initializer_range=0.1,
    )
    return Policy(model, tiny_policy().vocabulary)


@torch.no_grad()
def difference(policy: Policy, rows: Sequence[Sequence[Completion]], sampling: Sampling) -> float:
    """Largest |engine - transformers| over all tokens, by the definition of convention
    "sampled".
    """
    found = []
    for prompt, row in zip(PROMPTS, rows, strict=True):
        for completion in row:
            logp_TV = reference_distribution(policy, prompt, completion.tokens)
            drawn = [
                servers.distribution(row_V, sampling.temperature, sampling.top_k, sampling.top_p)
                for row_V in logp_TV.double().numpy()
            ]
            with np.errstate(divide="ignore"):
                expected = [
                    np.log(row_V[token])
                    for row_V, token in zip(drawn, completion.tokens, strict=True)
                ]
            found.append(np.abs(np.array(completion.logprobs) - expected).max())
    return float(max(found))


@pytest.fixture(scope="module", params=["tied", "lora", "untied"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Policy, VllmEngine]]:
    policy = lora_policy() if request.param == "lora" else medium_policy(request.param == "tied")
    with VllmEngine(policy, Vllm(python=PYTHON), tmp_path_factory.mktemp("served")) as engine:
        yield policy, engine


class TestVllm:
    pytestmark = real

    @pytest.mark.parametrize(
        "sampling",
        [PLAIN, SHAPED, Sampling(max_tokens=12, temperature=0.0)],
        ids=["plain", "shaped", "greedy"],
    )
    def test_logprobs_are_the_trainers(
        self, served: tuple[Policy, VllmEngine], sampling: Sampling
    ) -> None:
        policy, engine = served
        rows = engine.sample(PROMPTS, 8, sampling, seed=0)
        reference = sampling if sampling.temperature else PLAIN
        measured = difference(policy, rows, reference)
        print(f"\nlargest difference {measured:.2e}")
        assert measured < TOLERANCE
        completions = [completion for row in rows for completion in row]
        end = policy.vocabulary.end_id
        assert all(
            (c.tokens[-1] == end) == (c.ending == "stop") and end not in c.tokens[:-1]
            for c in completions
        )

    def test_the_seed_decides_the_tokens(self, served: tuple[Policy, VllmEngine]) -> None:
        _, engine = served
        tokens = [
            [[c.tokens for c in row] for row in engine.sample(PROMPTS, 4, PLAIN, seed)]
            for seed in (0, 0, 1)
        ]
        assert tokens[0] == tokens[1] != tokens[2]
        assert all(len(set(row)) > 1 for row in tokens[0])

    def test_refresh_makes_the_server_follow(self, served: tuple[Policy, VllmEngine]) -> None:
        policy, engine = served
        for _ in range(2):
            before = copy.deepcopy(policy.model.state_dict())
            disturb(policy)
            assert difference(policy, engine.sample(PROMPTS, 8, SHAPED, seed=2), PLAIN) > 0.05, (
                "the change must show for this to test anything"
            )
            engine.refresh()
            measured = max(
                difference(policy, engine.sample(PROMPTS, 8, sampling, seed=3), sampling)
                for sampling in (PLAIN, SHAPED)
            )
            print(f"\nlargest difference after refresh {measured:.2e}")
            assert measured < TOLERANCE
            policy.model.load_state_dict(before)
            engine.refresh()
            assert difference(policy, engine.sample(PROMPTS, 8, PLAIN, seed=4), PLAIN) < TOLERANCE

    def test_another_client_of_the_same_server_gets_the_same(
        self, served: tuple[Policy, VllmEngine], tmp_path: Path
    ) -> None:
        policy, engine = served
        other = OpenAIEngine(policy, OpenAI(url=f"{engine.url}/v1"), tmp_path)
        rows = other.sample(PROMPTS, 4, SHAPED, seed=5)
        assert [[c.tokens for c in row] for row in rows] == [
            [c.tokens for c in row] for row in engine.sample(PROMPTS, 4, SHAPED, seed=5)
        ]

    def test_what_does_not_fit_the_model_is_refused(
        self, served: tuple[Policy, VllmEngine]
    ) -> None:
        with pytest.raises(ValueError, match=r"refuses the request \(400\)"):
            served[1].sample([(5,) * 300], 1, PLAIN, seed=0)


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Policy, VllmEngine]]:
    """A server as its default is, log-probs without temperature and truncation, that takes adapters
    while it runs.
    """
    policy = lora_policy()
    raw = ("--logprobs-mode", "raw_logprobs", "--enable-lora", "--max-lora-rank", "8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
        with VllmEngine(
            tiny_policy(), Vllm(python=PYTHON, args=raw), tmp_path_factory.mktemp("by-hand")
        ) as engine:
            yield policy, engine


class TestVllmByHand:
    pytestmark = real

    def test_the_default_logprobs_are_no_convention_of_ours(
        self, by_hand: tuple[Policy, VllmEngine], tmp_path: Path
    ) -> None:
        policy, url = tiny_policy(), f"{by_hand[1].url}/v1"
        right = OpenAIEngine(policy, OpenAI(url=url, logprobs="full"), tmp_path)
        assert difference(policy, right.sample(PROMPTS, 8, PLAIN, seed=0), PLAIN) < TOLERANCE
        with pytest.raises(
            ValueError,
            match=r"declared 'full' and the crew's 'sampled', which differ at temperature=0\.7",
        ):
            right.sample(PROMPTS, 8, SHAPED, seed=0)
        wrong = OpenAIEngine(policy, OpenAI(url=url), tmp_path)
        with pytest.raises(
            ValueError,
            match=r"with top_k = 1 it gives -.* start vLLM with --logprobs-mode processed_logprobs",
        ):
            wrong.sample(PROMPTS, 8, SHAPED, seed=0)
        wrong._probed = True
        measured = difference(policy, wrong.sample(PROMPTS, 8, SHAPED, seed=0), SHAPED)
        print(f"\nlargest difference of raw log-probs {measured:.2f}")
        assert measured > 0.3

    def test_an_adapter_is_followed(
        self, by_hand: tuple[Policy, VllmEngine], tmp_path: Path
    ) -> None:
        policy, server = by_hand
        engine = OpenAIEngine(
            policy, OpenAI(url=f"{server.url}/v1", logprobs="full", lora=True), tmp_path
        )
        first = difference(policy, engine.sample(PROMPTS, 8, PLAIN, seed=0), PLAIN)
        disturb(policy)
        stale = difference(policy, engine.sample(PROMPTS, 8, PLAIN, seed=0), PLAIN)
        engine.refresh()
        second = difference(policy, engine.sample(PROMPTS, 8, PLAIN, seed=0), PLAIN)
        engine.close()
        print(
            f"\nlargest difference of an adapter {first:.2e}, not followed {stale:.2f}, followed "
            f"{second:.2e}"
        )
        assert first < TOLERANCE
        assert second < TOLERANCE < stale
