"""A completions server of ours that speaks as vLLM, as an older vLLM, as llama.cpp or as a hosted
service, and draws from a table.

`python servers.py --model FOLDER --port N` is a stand-in for vLLM's own: its table is made from the
bytes of the weights in the folder.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

NUM_TOKENS = 30
END = 1
OWNERS = {"vllm": "vllm", "spelled": "vllm", "llamacpp": "llamacpp", "text": "openai"}


def table(seed: int = 0) -> np.ndarray:
    """Logits [V, V] of the next token given the last one."""
    return np.random.default_rng(seed).normal(size=(NUM_TOKENS, NUM_TOKENS)) * 2


def distribution(
    logits_V: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> np.ndarray:
    """Probabilities that are really drawn from."""
    order = np.argsort(-logits_V)
    probability = np.exp(logits_V / (temperature or 1.0))
    if top_k > 0:
        probability[order[top_k:]] = 0
    probability /= probability.sum()
    before = np.cumsum(probability[order]) - probability[order]
    probability[order[before >= top_p]] = 0
    return probability / probability.sum()


@dataclass
class Behaviour:
    """What a server does, and what it was asked."""

    dialect: str = "vllm"
    logprobs: str = "processed"  # or "raw": those of the softmax at temperature 1
    copies: bool = False  # every sample of a request has the request's seed
    num_choices: int = 0  # above 0: no more of them, whatever was asked
    key: str = ""
    models: tuple[str, ...] = ("policy", "other")
    faults: list[int] = field(default_factory=list)  # statuses of the next answers
    edit: dict[str, Any] = field(default_factory=dict)  # replaces fields of every choice
    token_logprob: float | None = 0.0  # not 0: of every first token
    left_out: int | None = None  # tokens that were drawn and are not named, where usage is reported
    stall: threading.Event | None = None  # answers wait for it
    opinion: Callable[[str], str] = lambda prompt: ""  # what it says to a prompt that is a text
    weights: Path | None = None
    table: np.ndarray = field(default_factory=table)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    adapters: dict[str, list[str]] = field(default_factory=dict)  # loaded: the files of its folder

    def reload(self) -> None:
        assert self.weights is not None
        self.table = table(
            int.from_bytes(hashlib.sha256(self.weights.read_bytes()).digest()[:4], "big")
        )

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return {
                "data": [{"id": name, "owned_by": OWNERS[self.dialect]} for name in self.models]
            }
        if path == "/v1/completions" and isinstance(body["prompt"], str):
            return {"choices": [{"text": self.opinion(body["prompt"])}]}
        if path == "/v1/completions":
            choices = self._choices(body)
            return {"choices": choices} | (
                {} if self.left_out is None else {"usage": self._usage(choices)}
            )
        if path == "/v1/load_lora_adapter":
            self.adapters[body["lora_name"]] = sorted(
                file.name for file in Path(body["lora_path"]).iterdir()
            )
        elif path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
        elif path == "/collective_rpc" and body["method"] == "reload_weights":
            self.reload()
        elif path not in ("/health", "/reset_prefix_cache"):
            raise KeyError(path)
        return {"success": True}

    def _choices(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        if body["n"] > 1 and (body["temperature"] == 0 or self.dialect == "llamacpp"):
            raise KeyError("n must be 1")
        count = min(body["n"], self.num_choices or body["n"])
        made = [
            self._choice(body, index, body["seed"] + (0 if self.copies else index))
            for index in range(count)
        ]
        return made[::-1]  # their index says which they are

    def _usage(self, choices: Sequence[dict[str, Any]]) -> dict[str, int]:
        assert self.left_out is not None
        return {"completion_tokens": sum(len(choice["text"]) for choice in choices) + self.left_out}

    def _choice(self, body: dict[str, Any], index: int, seed: int) -> dict[str, Any]:
        ids, logprobs = self._draw(body, np.random.default_rng(seed))
        if self.token_logprob != 0:
            logprobs[0] = self.token_logprob
        stopped = ids[-1] == END
        choice = {
            "index": index,
            "text": "".join(chr(97 + i) for i in ids),
            "finish_reason": "stop" if stopped else "length",
        }
        return choice | self._spell(ids, logprobs, body) | self.edit

    def _draw(
        self, body: dict[str, Any], rng: np.random.Generator
    ) -> tuple[list[int], list[float | None]]:
        ids: list[int] = []
        logprobs: list[float | None] = []
        last = body["prompt"][-1]
        while len(ids) < body["max_tokens"] and END not in ids:
            drawn_V = distribution(
                self.table[last], body["temperature"], max(body["top_k"], 0), body["top_p"]
            )
            last = int(
                np.argmax(drawn_V)
                if body["temperature"] == 0
                else rng.choice(NUM_TOKENS, p=drawn_V)
            )
            processed = (
                self.logprobs == "processed"
                and body["temperature"] > 0
                and body.get("post_sampling_probs", True)
            )
            ids.append(last)
            logprobs.append(
                math.log(
                    (
                        drawn_V
                        if processed
                        else distribution(self.table[ids[-2] if ids[:-1] else body["prompt"][-1]])
                    )[last]
                )
            )
        return ids, logprobs

    def _spell(
        self, ids: Sequence[int], logprobs: Sequence[float | None], body: dict[str, Any]
    ) -> dict[str, Any]:
        if self.dialect == "llamacpp":
            after = body["post_sampling_probs"]
            name = "prob" if after else "logprob"
            value = lambda logprob: math.exp(logprob) if after and logprob is not None else logprob
            return {
                "logprobs": {
                    "content": [
                        {"id": i, "token": "x", name: value(v)}
                        for i, v in zip(ids, logprobs, strict=True)
                    ]
                }
            }
        tokens = ["x" if self.dialect == "text" else f"token_id:{i}" for i in ids]
        spelled = {"logprobs": {"tokens": tokens, "token_logprobs": list(logprobs)}}
        return spelled | ({"token_ids": list(ids)} if self.dialect == "vllm" else {})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    behaviour: Behaviour

    def do_GET(self) -> None:
        self._reply({})

    def do_POST(self) -> None:
        self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _reply(self, body: dict[str, Any]) -> None:
        behaviour = self.behaviour
        behaviour.asked.append((self.path, body))
        if behaviour.stall is not None:
            behaviour.stall.wait()
        if behaviour.key and self.headers["Authorization"] != f"Bearer {behaviour.key}":
            self._send(401, {"error": "who are you"})
        elif behaviour.faults:
            self._send(behaviour.faults.pop(0), {"error": "out of order"})
        else:
            try:
                self._send(200, behaviour.answer(self.path, body))
            except KeyError as error:
                self._send(400, {"error": f"bad request: {error}"})

    def _send(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


class _Listening(ThreadingHTTPServer):
    request_queue_size = 128  # as many clients as come at once


class FakeServer:
    """Serves a behaviour on a port of this machine until it is left."""

    def __init__(self, behaviour: Behaviour, port: int = 0) -> None:
        self.behaviour = behaviour
        self._server = _Listening(
            ("127.0.0.1", port), type("Handler", (_Handler,), {"behaviour": behaviour})
        )
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> FakeServer:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def main(arguments: Sequence[str]) -> None:
    options = dict(itertools.pairwise([*arguments, ""]))
    if "--refuse" in options:
        print("I refuse")
        raise SystemExit(3)
    behaviour = Behaviour(
        weights=Path(options["--model"]) / "model.safetensors",
        models=(options["--served-model-name"],),
    )
    behaviour.reload()
    with FakeServer(behaviour, int(options["--port"])):
        threading.Event().wait()


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
