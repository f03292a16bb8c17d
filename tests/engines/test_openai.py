from __future__ import annotations

import dataclasses
import http.server
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.servers import END, Behaviour, FakeServer, distribution
from fakes import lora_policy, tiny_policy
from motley.config.peers import OpenAI
from motley.engines.openai import Client, OpenAIEngine
from motley.models.policy import Policy
from motley.records import Sampling

PROMPTS = [(5, 12, 13, 14), (6, 20), (9,), (6, 20)]
PLAIN = Sampling(max_tokens=12)
SHAPED = Sampling(max_tokens=12, temperature=0.7, top_k=8, top_p=0.9)
DIALECTS = ("vllm", "spelled", "llamacpp")


@contextmanager
def engine(
    behaviour: Behaviour,
    policy: Policy | None = None,
    pauses: list[float] | None = None,
    **options: Any,
) -> Iterator[OpenAIEngine]:
    with FakeServer(behaviour) as server:
        config = OpenAI(url=server.url, **options)
        yield OpenAIEngine(
            policy or tiny_policy(),
            config,
            Path("unused"),
            (pauses if pauses is not None else []).append,
        )


def sample(
    behaviour: Behaviour,
    sampling: Sampling = PLAIN,
    num_samples: int = 6,
    seed: int = 0,
    **options: Any,
) -> Any:
    with engine(behaviour, **options) as made:
        return made.sample(PROMPTS, num_samples, sampling, seed)


def requests(behaviour: Behaviour) -> list[dict[str, Any]]:
    return [body for path, body in behaviour.asked if path == "/v1/completions"]


def expected_logprobs(
    behaviour: Behaviour, prompt: Sequence[int], tokens: Sequence[int], sampling: Sampling
) -> list[float]:
    before = [prompt[-1], *tokens[:-1]]
    shape = (sampling.temperature, sampling.top_k, sampling.top_p)
    return [
        math.log(distribution(behaviour.table[last], *shape)[token])
        for last, token in zip(before, tokens, strict=True)
    ]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("sampling", [PLAIN, SHAPED])
def test_tokens_and_logprobs_are_the_servers_own_in_the_order_of_the_prompts(
    dialect: str, sampling: Sampling
) -> None:
    behaviour = Behaviour(dialect=dialect)
    rows = sample(behaviour, sampling)
    assert [len(row) for row in rows] == [6] * 4
    for prompt, row in zip(PROMPTS, rows, strict=True):
        for completion in row:
            np.testing.assert_allclose(
                completion.logprobs,
                expected_logprobs(behaviour, prompt, completion.tokens, sampling),
                atol=1e-9,
            )


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_end_token_is_part_of_what_stopped_and_of_nothing_else(dialect: str) -> None:
    completions = [completion for row in sample(Behaviour(dialect=dialect)) for completion in row]
    assert {completion.ending for completion in completions} == {"stop", "length"}
    for completion in completions:
        assert (completion.tokens[-1] == END) == (completion.ending == "stop")
        assert completion.ending == "stop" or len(completion.tokens) == PLAIN.max_tokens
        assert END not in completion.tokens[:-1]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_seed_decides_the_tokens_and_every_sample_has_its_own(dialect: str) -> None:
    rows = sample(Behaviour(dialect=dialect), seed=3)
    assert sample(Behaviour(dialect=dialect), seed=3) == rows
    assert sample(Behaviour(dialect=dialect), seed=4) != rows
    assert all(len({completion.tokens for completion in row}) > 3 for row in rows)
    assert rows[1] != rows[3], "equal prompts at two places"


@pytest.mark.parametrize("fault", [{"copies": True}, {"num_choices": 1}])
def test_a_server_that_makes_one_sample_per_request_is_asked_for_one_at_a_time(
    fault: dict[str, Any],
) -> None:
    behaviour = Behaviour(**fault)
    with engine(behaviour) as made:
        rows = made.sample(PROMPTS, 5, PLAIN, seed=0)
        assert made.sample(PROMPTS, 5, PLAIN, seed=0) == rows
    assert [body["n"] for body in requests(behaviour)] == [5] * 4 + [1] * 20 + [1] * 20
    assert all(len({completion.tokens for completion in row}) > 3 for row in rows)


def test_sure_samples_are_no_copies() -> None:
    behaviour = Behaviour()
    behaviour.table = behaviour.table * 100
    rows = sample(behaviour)
    assert all(len({completion.tokens for completion in row}) == 1 for row in rows)
    assert len(requests(behaviour)) == 4


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("meaning", ["sampled", "full"])
def test_greedy_is_asked_for_once_and_reported_at_temperature_1(dialect: str, meaning: str) -> None:
    behaviour = Behaviour(dialect=dialect)
    sampling = Sampling(max_tokens=12, temperature=0.0, top_k=3)
    rows = sample(behaviour, sampling, logprobs=meaning)
    assert len(requests(behaviour)) == 4
    for prompt, row in zip(PROMPTS, rows, strict=True):
        assert row == row[:1] * 6
        np.testing.assert_allclose(
            row[0].logprobs, expected_logprobs(behaviour, prompt, row[0].tokens, PLAIN), atol=1e-9
        )


def test_a_request_leaves_nothing_to_the_servers_defaults() -> None:
    behaviour = Behaviour()
    sample(behaviour, num_samples=2)
    first = next(body for body in requests(behaviour) if body["prompt"] == [5, 12, 13, 14])
    assert 0 <= first.pop("seed") < 2**31
    assert first == {
        "model": "policy",
        "prompt": [5, 12, 13, 14],
        "n": 2,
        "max_tokens": 12,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stop_token_ids": [END],
        "ignore_eos": True,
    }


def test_llama_cpp_is_never_told_to_ignore_its_end_token() -> None:
    behaviour = Behaviour(dialect="llamacpp")
    sample(behaviour)
    assert all(
        "ignore_eos" not in body and body["logprobs"] == 1 and body["n"] == 1
        for body in requests(behaviour)
    )


def test_what_fails_for_a_while_is_asked_again() -> None:
    behaviour, pauses = Behaviour(), []
    with engine(behaviour, pauses=pauses) as made:
        behaviour.faults = [503, 500, 429]
        rows = made.sample(PROMPTS[:1], 2, PLAIN, seed=0)
    assert pauses == [0.5, 1.0, 2.0]
    assert rows == [sample(Behaviour(), num_samples=2)[0]]


def test_what_fails_for_good_is_asked_four_times() -> None:
    behaviour = Behaviour()
    with engine(behaviour) as made:
        behaviour.faults = [500] * 9
        with pytest.raises(
            ConnectionError,
            match=(
                r"/v1/completions failed with 500: .*out of order.*; look at the server's own log"
            ),
        ):
            made.sample(PROMPTS[:1], 1, PLAIN, seed=0)
    assert len(requests(behaviour)) == 4


def test_a_refused_request_is_not_repeated() -> None:
    behaviour = Behaviour()
    with engine(behaviour) as made:
        behaviour.faults = [400]
        with pytest.raises(ValueError, match=r"refuses the request \(400\): .*out of order"):
            made.sample(PROMPTS[:1], 1, PLAIN, seed=0)
    assert len(requests(behaviour)) == 1


def test_no_server_is_said_with_its_address() -> None:
    with FakeServer(Behaviour()) as server:
        url = server.url
    pauses: list[float] = []
    with pytest.raises(
        ConnectionError, match=rf"no server answers at {url}/models .*start it, or correct the url"
    ):
        OpenAIEngine(tiny_policy(), OpenAI(url=url), Path("unused"), pauses.append)
    assert pauses == [0.5, 1.0, 2.0]


def test_a_server_that_takes_too_long_is_not_asked_again() -> None:
    behaviour = Behaviour()
    with engine(behaviour) as made:
        # from here on: a busy machine may take longer to open it
        made._client = dataclasses.replace(made._client, timeout_s=0.2)
        behaviour.stall = threading.Event()
        try:
            with pytest.raises(TimeoutError, match=r"gave no answer within 0.2 s; raise timeout_s"):
                made.sample(PROMPTS[:1], 1, PLAIN, seed=0)
        finally:
            behaviour.stall.set()
    assert len(requests(behaviour)) == 1


def test_the_key_is_sent_and_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"refuses the key \(401\); set key_env"):
        sample(Behaviour(key="secret"))
    with pytest.raises(ValueError, match="key_env='MOTLEY_KEY' is not set; export MOTLEY_KEY=KEY"):
        sample(Behaviour(key="secret"), key_env="MOTLEY_KEY")
    monkeypatch.setenv("MOTLEY_KEY", "secret")
    assert sample(Behaviour(key="secret"), key_env="MOTLEY_KEY") == sample(Behaviour())


def test_the_model_is_the_named_one_or_the_first() -> None:
    behaviour = Behaviour()
    sample(behaviour, model="other")
    assert {body["model"] for body in requests(behaviour)} == {"other"}
    with pytest.raises(ValueError, match="has no model 'third'; it offers policy, other"):
        sample(Behaviour(), model="third")


def test_what_is_no_openai_api_is_said() -> None:
    behaviour = Behaviour(edit={"finish_reason": 3})
    with pytest.raises(
        ValueError, match=r"is not the OpenAI API .*finish_reason.*; the url usually ends in /v1"
    ):
        sample(behaviour)


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (
            Behaviour(dialect="text"),
            r"gives \d+ log-probs and 0 token ids.*use vLLM \(return_token_ids\) or llama.cpp",
        ),
        (Behaviour(edit={"logprobs": None}), "gives no log-probs.*use vLLM"),
        (Behaviour(edit={"token_ids": [4]}), r"gives \d+ log-probs and 1 token ids"),
        (Behaviour(token_logprob=None), r"gives log-prob None for token \d+, which it drew"),
        (Behaviour(token_logprob=-9999.0), r"gives log-prob -9999.0 for token"),
        (Behaviour(token_logprob=0.5), r"gives log-prob 0.5 for token"),
        (Behaviour(dialect="llamacpp", token_logprob=-math.inf), r"gives log-prob None for token"),
        (
            Behaviour(edit={"finish_reason": "abort"}),
            r"ended a completion with 'abort' after tokens .* end token of the policy, \[1\]",
        ),
    ],
)
def test_answers_that_cannot_be_learned_from_are_refused(
    behaviour: Behaviour, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sample(behaviour)


def test_an_end_token_that_the_server_left_out_is_missed() -> None:
    behaviour = Behaviour(
        edit={
            "finish_reason": "stop",
            "token_ids": [4, 5],
            "logprobs": {"token_logprobs": [-1.0, -2.0]},
        }
    )
    with pytest.raises(ValueError, match=r"ended a completion with 'stop' after tokens \[4, 5\]"):
        sample(behaviour)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_tokens_that_the_server_does_not_name_are_missed(dialect: str) -> None:
    assert sample(Behaviour(dialect=dialect, left_out=0)) == sample(Behaviour(dialect=dialect))
    with pytest.raises(
        ValueError, match=r"the server drew \d+ tokens and names \d+: llama.cpp leaves out"
    ):
        sample(Behaviour(dialect=dialect, left_out=1))


def test_what_follows_the_first_end_token_is_cut() -> None:
    ids = {
        "token_ids": [4, END, 5],
        "logprobs": {"token_logprobs": [-1.0, -2.0, -3.0]},
        "finish_reason": "length",
    }
    completion = sample(Behaviour(edit=ids), num_samples=1)[0][0]
    assert (completion.tokens, completion.logprobs, completion.ending) == (
        (4, END),
        (-1.0, -2.0),
        "stop",
    )


def test_a_completion_cut_short_for_want_of_room_is_refused() -> None:
    short = {
        "token_ids": [4, 5],
        "logprobs": {"token_logprobs": [-1.0, -2.0]},
        "finish_reason": "length",
    }
    with pytest.raises(ValueError, match="ended a completion after 2 tokens of 12 without an end"):
        sample(Behaviour(edit=short), num_samples=1)


def test_a_rounded_zero_is_zero() -> None:
    assert sample(Behaviour(token_logprob=1e-7), num_samples=1)[0][0].logprobs[0] == 0.0


@pytest.mark.parametrize(
    ("dialect", "meaning", "convention", "shape", "fits"),
    [
        ("vllm", "sampled", "sampled", {"temperature": 0.7, "top_k": 8}, True),
        ("vllm", "sampled", "full", {"temperature": 0.7}, True),
        ("vllm", "sampled", "full", {"top_p": 0.9}, False),
        ("vllm", "full", "sampled", {}, True),
        ("vllm", "full", "full", {"top_k": 8}, True),
        ("vllm", "full", "sampled", {"top_k": 8}, False),
        ("vllm", "full", "full", {"temperature": 0.7}, False),
        ("vllm", "full", "sampled", {"temperature": 0.7}, False),
        ("vllm", "full", "sampled", {"temperature": 0.0, "top_k": 8}, True),
        ("llamacpp", "sampled", "sampled", {"temperature": 0.7, "top_p": 0.9}, True),
        ("llamacpp", "full", "full", {"temperature": 0.7}, False),
    ],
)
def test_conventions_that_differ_are_refused(
    dialect: str, meaning: str, convention: str, shape: dict[str, Any], fits: bool
) -> None:
    behaviour = Behaviour(dialect=dialect, logprobs="processed" if meaning == "sampled" else "raw")
    sampling = Sampling(max_tokens=4, logprobs=convention, **shape)
    if fits:
        assert len(sample(behaviour, sampling, logprobs=meaning)) == 4
        return
    with pytest.raises(
        ValueError,
        match=rf"declared '{meaning}' and the crew's '{convention}', which differ at temperature=",
    ):
        sample(behaviour, sampling, logprobs=meaning)
    assert requests(behaviour) == []


def test_a_server_that_was_declared_wrongly_is_found_out_where_it_matters() -> None:
    assert len(sample(Behaviour(logprobs="raw"), PLAIN)) == 4
    for sampling in (Sampling(temperature=0.7), Sampling(top_k=8), Sampling(top_p=0.9)):
        with pytest.raises(
            ValueError,
            match=(
                r"with top_k = 1 it gives -\d.* where 0 is right.*--logprobs-mode "
                r"processed_logprobs"
            ),
        ):
            sample(Behaviour(logprobs="raw"), sampling)


def test_it_is_tried_out_once() -> None:
    behaviour = Behaviour()
    with engine(behaviour) as made:
        for _ in range(3):
            made.sample(PROMPTS, 2, SHAPED, seed=0)
    assert [body["top_k"] for body in requests(behaviour)] == [1] + [8] * 12


def test_without_adapters_the_server_keeps_its_weights() -> None:
    behaviour = Behaviour()
    with engine(behaviour) as made:
        made.refresh()
        assert not made.follows
    assert [path for path, _ in behaviour.asked] == ["/v1/models"]


def test_every_refresh_loads_the_adapter_under_a_new_name(tmp_path: Path) -> None:
    behaviour, policy = Behaviour(), lora_policy()
    with FakeServer(behaviour) as server:
        made = OpenAIEngine(policy, OpenAI(url=server.url, lora=True), tmp_path)
        assert made.follows
        (first,) = behaviour.adapters
        assert {"adapter_config.json", "adapter_model.safetensors"} <= set(
            behaviour.adapters[first]
        )
        made.refresh()
        (second,) = behaviour.adapters
        made.sample(PROMPTS[:1], 1, PLAIN, seed=0)
        assert second != first
        assert requests(behaviour)[-1]["model"] == second
        assert [folder.name for folder in tmp_path.iterdir()] == [second]
        made.close()
    assert behaviour.adapters == {}
    assert list(tmp_path.iterdir()) == []


def test_a_policy_without_an_adapter_cannot_be_followed() -> None:
    with pytest.raises(
        ValueError, match="lora = true, and the peer trains no adapter; write train ="
    ):
        sample(Behaviour(), lora=True)


@pytest.mark.slow
def test_a_key_does_not_follow_a_server_that_points_elsewhere() -> None:
    seen: list[str] = []

    class Elsewhere(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{server.server_port}/stolen")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            return None

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises((ValueError, ConnectionError), match="302"):
            Client(
                f"http://127.0.0.1:{server.server_port}/v1", "secret", pause=lambda seconds: None
            ).ask("models")
        server.shutdown()
    assert set(seen) == {"/v1/models"}
