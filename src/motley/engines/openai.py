"""Sampling from a server that someone else runs, through the OpenAI completions API.

Differs from an ordinary client: prompts and answers are token ids and never text, since a text has
more than one spelling; and everything that would change the distribution is sent with each request,
since servers fill what is left out from the model's own defaults.
"""

from __future__ import annotations

import http.client
import math
import os
import random
import secrets
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec

from motley.clock import RealClock
from motley.config.peers import OpenAI
from motley.engines.engine import Completion
from motley.models.policy import Policy
from motley.records import Convention, Sampling

Body = dict[str, object]  # of a request, as JSON has it
TRIES = 4
FIRST_PAUSE_S = 0.5  # doubled after every try
MAX_REQUESTS = 64  # at a time; a server queues what it cannot take
ROUNDING = 1e-3  # a log-prob this far above 0 is a rounded 0
MINUS_INFINITY = -9999.0  # how servers spell it
COINCIDENCE = math.log(1e-9)  # less likely than this, samples that are all equal are copies
VLLM, LLAMA_CPP = "vllm", "llamacpp"  # how servers name themselves as the owners of their models
# Servers fill what is left out: vLLM from the model's generation_config.json, llama.cpp from
# defaults that truncate.
NO_SHAPING = {
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
EXACT_TOKENS = {"return_token_ids": True, "return_tokens_as_token_ids": True}
T = TypeVar("T")
_REMEDY = {
    VLLM: (
        "start vLLM with --logprobs-mode processed_logprobs, or sample with temperature = 1, "
        "top_k = 0 and top_p = 1"
    ),
    "": (
        "use a server that gives what the crew declares, or sample with temperature = 1, top_k = "
        "0 and top_p = 1"
    ),
}


class _Model(msgspec.Struct):
    id: str
    owned_by: str = ""


class _Models(msgspec.Struct):
    data: list[_Model]


class _Content(msgspec.Struct):
    """One token as llama.cpp writes it: `logprob` before its samplers, `prob` after them."""

    id: int | None = None
    logprob: float | None = None
    prob: float | None = None


class _Logprobs(msgspec.Struct):
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    content: list[_Content] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class _Drawn(NamedTuple):
    ids: list[int]
    logprobs: list[float | None]
    finish_reason: str | None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A key is for the server it was given for.

    What sends us elsewhere is refused like any other answer that is none.
    """

    def redirect_request(self, *arguments: object) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Client:
    """Requests to one server.

    What may pass by itself is tried again; everything else is an error that says what to do.
    """

    url: str
    key: str = ""
    timeout_s: float = 600.0
    pause: Callable[[float], None] = RealClock().sleep_s

    def ask(self, path: str, body: Body | None = None) -> bytes:
        """POST a body, or GET without one."""
        for attempt in range(TRIES - 1):
            try:
                return self.ask_once(path, body)
            except ConnectionError:
                self.pause(FIRST_PAUSE_S * 2**attempt)
        return self.ask_once(path, body)

    def ask_once(self, path: str, body: Body | None = None) -> bytes:
        """ConnectionError: it may work later."""
        address = f"{self.url.rstrip('/')}/{path}"
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self.key}"} if self.key else {}
        )
        request = urllib.request.Request(
            address, None if body is None else msgspec.json.encode(body), headers
        )
        here = urllib.parse.urlsplit(self.url).hostname in ("127.0.0.1", "localhost", "::1")
        # without it those of the environment
        proxies = [urllib.request.ProxyHandler({})] if here else []
        try:
            with urllib.request.build_opener(_NoRedirects, *proxies).open(
                request, timeout=self.timeout_s
            ) as reply:
                return bytes(reply.read())
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(address, error.code, error.read().decode(errors="replace")) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise TimeoutError(
                    f"{address} gave no answer within {self.timeout_s:g} s; raise timeout_s, or "
                    "ask for less"
                ) from error
            raise ConnectionError(
                f"no server answers at {address} ({reason}); start it, or correct the url"
            ) from error


class OpenAIEngine:
    """`follows`: whether the server's weights are the policy's.

    Where not, the log-probs are those of the server's own weights.
    """

    keeps_snapshot = True

    def __init__(
        self,
        policy: Policy,
        config: OpenAI,
        folder: Path,
        pause: Callable[[float], None] = RealClock().sleep_s,
    ) -> None:
        """`folder`: for adapters; the server must see it too."""
        self._policy = policy
        self._config = config
        self._folder = folder.absolute()
        self.follows: Final = config.lora
        self._client = Client(config.url, key_of(config), config.timeout_s, pause)
        model = choose_model(self._client, config)
        self._model, self._owner = model.id, model.owned_by
        self._apart = self._owner == LLAMA_CPP  # it makes no more samples at once than it has slots
        self._probed = False
        self._adapter: Path | None = None
        self.refresh()

    def refresh(self) -> None:
        """Give the server the present adapter, under a new name, so that nothing it kept of the
        last one is used.
        """
        if not self.follows:
            return
        if not hasattr(self._policy.model, "peft_config"):
            raise ValueError(
                "openai lora = true, and the peer trains no adapter; write train = { lora = { "
                "rank = 8 } }, or remove lora"
            )
        new = self._folder / f"motley-{secrets.token_hex(6)}"
        self._policy.save(new)
        self._client.ask("load_lora_adapter", {"lora_name": new.name, "lora_path": str(new)})
        self.close()
        self._adapter, self._model = new, new.name

    def close(self) -> None:
        """Take the adapter back."""
        if self._adapter is not None:
            self._client.ask("unload_lora_adapter", {"lora_name": self._adapter.name})
            shutil.rmtree(self._adapter)
            self._adapter = None

    def sample(
        self, prompts: Sequence[Sequence[int]], num_samples: int, sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        _check_convention(sampling, self._config.logprobs, self._owner)
        if sampling.temperature == 0:
            return [row * num_samples for row in self._rows(prompts, 1, sampling, seed)]
        if (
            not self._probed
            and self._config.logprobs == "sampled"
            and (sampling.temperature, sampling.top_k, sampling.top_p) != (1, 0, 1)
        ):
            self._probe(prompts[0])
        if not self._apart:
            rows = self._rows(prompts, num_samples, sampling, seed)
            if all(len(row) == num_samples for row in rows) and not _are_copies(rows):
                return rows
            self._apart = True
        single = self._rows([p for p in prompts for _ in range(num_samples)], 1, sampling, seed)
        return [
            [row[0] for row in single[i : i + num_samples]]
            for i in range(0, len(single), num_samples)
        ]

    def _probe(self, prompt: Sequence[int]) -> None:
        """Refuse a server whose log-probs leave truncation out: the only token that top_k = 1
        leaves has log-prob 0.
        """
        ((only,),) = self._rows([prompt], 1, Sampling(top_k=1, max_tokens=1), seed=0)
        if only.logprobs[0] < -ROUNDING:
            raise ValueError(
                "the server's log-probs are declared 'sampled', and with top_k = 1 it gives "
                f"{only.logprobs[0]:.4f} where 0 is right: "
                f"they leave out how it draws; {_REMEDY.get(self._owner, _REMEDY[''])}"
            )
        self._probed = True

    def _rows(
        self, prompts: Sequence[Sequence[int]], num_samples: int, sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        """One request per prompt, each with its own seed, all at the same time."""
        bodies = [
            self._request(prompt, num_samples, sampling, _seed(seed, place))
            for place, prompt in enumerate(prompts)
        ]
        pool = ThreadPoolExecutor(MAX_REQUESTS)
        try:
            return list(pool.map(self._complete, bodies))
        finally:  # where one fails, the others' answers are not waited for
            pool.shutdown(wait=False, cancel_futures=True)

    def _request(
        self, prompt: Sequence[int], num_samples: int, sampling: Sampling, seed: int
    ) -> Body:
        body: Body = {
            "model": self._model,
            "prompt": list(prompt),
            "n": num_samples,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "seed": seed,
            # alternatives, which nobody needs; others give nothing for 0
            "logprobs": 0 if self._owner == VLLM else 1,
            "stop_token_ids": list(self._policy.vocabulary.end_ids),
            **NO_SHAPING,
            **EXACT_TOKENS,
        }
        if self._owner == VLLM:
            # exactly our end tokens end it; llama.cpp would make them impossible instead
            body["ignore_eos"] = True
        if self._owner == LLAMA_CPP:
            body["post_sampling_probs"] = (
                self._config.logprobs == "sampled" and sampling.temperature > 0
            )
        return body

    def _complete(self, body: Body) -> list[Completion]:
        reply = decode_reply(self._client.ask("completions", body), _Reply, self._client.url)
        drawn = [
            _exact(choice) for choice in sorted(reply.choices, key=lambda choice: choice.index)
        ]
        _check_count(sum(len(choice.ids) for choice in drawn), reply.usage)
        made = [_completion(choice, self._policy.vocabulary.end_ids) for choice in drawn]
        _check_room(made, body["max_tokens"])
        return made


def key_of(config: OpenAI) -> str:
    """The key that a server wants, from the environment."""
    if config.key_env and config.key_env not in os.environ:
        raise ValueError(
            f"openai key_env={config.key_env!r} is not set; export {config.key_env}=KEY before "
            "starting"
        )
    return os.environ.get(config.key_env, "")


def choose_model(client: Client, config: OpenAI) -> _Model:
    """The one that is asked for, or the first that the server names."""
    offered = decode_reply(client.ask("models"), _Models, client.url).data
    served = [model for model in offered if config.model in ("", model.id)]
    if not served:
        names = ", ".join(model.id for model in offered) or "none"
        raise ValueError(
            f"the server at {client.url} has no model {config.model!r}; it offers {names}"
        )
    return served[0]


def decode_reply(content: bytes, wanted: type[T], url: str) -> T:
    """What a server answered; ValueError where that is no such thing."""
    try:
        return msgspec.json.decode(content, type=wanted)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"what {url} answers is not the OpenAI API ({error}): {content[:200]!r}; the url "
            "usually ends in /v1"
        ) from error


def _refusal(address: str, status: int, content: str) -> Exception:
    said = content.strip()[:500] or "nothing"
    if status in (401, 403):
        return ValueError(
            f"{address} refuses the key ({status}); set key_env to the name of the environment "
            "variable that holds it"
        )
    if status == 429 or status >= 500:
        return ConnectionError(
            f"{address} failed with {status}: {said}; look at the server's own log"
        )
    return ValueError(f"{address} refuses the request ({status}): {said}")


def _check_convention(sampling: Sampling, meaning: Convention, owner: str) -> None:
    """Refuse numbers of another meaning than declared: nothing can convert them afterwards."""
    fits = meaning == sampling.logprobs or (sampling.top_k == 0 and sampling.top_p == 1)
    # vLLM and llama.cpp then mean the softmax at temperature 1, whatever was asked
    if meaning == "full" and sampling.temperature != 1:
        fits = sampling.logprobs == "full" and owner not in (VLLM, LLAMA_CPP)
    if not fits and sampling.temperature > 0:
        raise ValueError(
            f"the server's log-probs are declared {meaning!r} and the crew's "
            f"{sampling.logprobs!r}, which differ at temperature="
            f"{sampling.temperature}, top_k={sampling.top_k}, top_p={sampling.top_p}; declare "
            'logprobs = "sampled" for both the server and '
            f"[sampling]: {_REMEDY.get(owner, _REMEDY[''])}"
        )


def _seed(seed: int, place: int) -> int:
    return random.Random(f"{seed}/{place}").getrandbits(31)  # every server takes as much


def _are_copies(rows: Sequence[Sequence[Completion]]) -> bool:
    """Whether the samples of every prompt are all equal, and that cannot be chance: the server gave
    each the same seed.
    """
    alike = all(completion.tokens == row[0].tokens for row in rows for completion in row)
    return alike and sum((len(row) - 1) * sum(row[0].logprobs) for row in rows) < COINCIDENCE


def _exact(choice: _Choice) -> _Drawn:
    """Ids and log-probs of a choice, in whichever of three ways its server writes them."""
    given = choice.logprobs
    if given is None or (given.content is None and given.token_logprobs is None):
        raise ValueError(
            "the server gives no log-probs, and without them its samples teach nothing; use vLLM "
            "or llama.cpp's llama-server"
        )
    if given.content is not None:
        ids = [token.id for token in given.content if token.id is not None]
        logprobs = [
            math.log(token.prob) if token.prob else token.logprob for token in given.content
        ]
    else:
        logprobs = given.token_logprobs or []
        spelled = [token for token in given.tokens or [] if token.startswith("token_id:")]
        ids = (
            choice.token_ids
            if choice.token_ids is not None
            else [int(token.removeprefix("token_id:")) for token in spelled]
        )
    if len(ids) != len(logprobs):
        raise ValueError(
            f"the server gives {len(logprobs)} log-probs and {len(ids)} token ids, and its text "
            "does not say which tokens were drawn; "
            "use vLLM (return_token_ids) or llama.cpp's llama-server"
        )
    return _Drawn(ids, logprobs, choice.finish_reason)


def _check_count(named: int, usage: _Usage | None) -> None:
    if usage is not None and usage.completion_tokens not in (None, named):
        raise ValueError(
            f"the server drew {usage.completion_tokens} tokens and names {named}: llama.cpp "
            "leaves out those that end inside a character "
            "of several bytes, and what is left out cannot be learned from; use vLLM, or a lower "
            "temperature or top_k"
        )


def _check_room(made: Sequence[Completion], max_tokens: object) -> None:
    """Refuse what ended for want of room: readers take an answer cut short for a made-up one."""
    assert isinstance(max_tokens, int)
    shortest = min((len(c.tokens) for c in made if c.ending == "length"), default=max_tokens)
    if shortest < max_tokens:
        raise ValueError(
            f"the server ended a completion after {shortest} tokens of {max_tokens} without an "
            "end token; give it a longer context, or lower max_tokens"
        )


def _completion(drawn: _Drawn, end_ids: Sequence[int]) -> Completion:
    """What follows the first end token is not ours."""
    length = next((place + 1 for place, token in enumerate(drawn.ids) if token in end_ids), 0)
    if not length and drawn.finish_reason != "length":
        raise ValueError(
            f"the server ended a completion with {drawn.finish_reason!r} after tokens "
            f"{drawn.ids[-3:]}, and none is an end token of the "
            f"policy, {list(end_ids)[:8]}; serve the policy's own model, with a server that gives "
            "the end token and its log-prob too"
        )
    tokens = tuple(drawn.ids[: length or None])
    return Completion(
        tokens, tuple(map(_checked, drawn.logprobs, tokens)), "stop" if length else "length"
    )


def _checked(logprob: float | None, token: int) -> float:
    if logprob is None or not MINUS_INFINITY < logprob <= ROUNDING:
        raise ValueError(
            f"the server gives log-prob {logprob} for token {token}, which it drew; expected a "
            "finite number of at most 0"
        )
    return min(logprob, 0.0)
