"""Sampling from a vLLM server that Motley starts as a child process, from an environment of its
own, and that follows the policy.

The server has no tokenizer, since only ids go in and out. Its weights are a Hugging Face folder,
adapters merged, that is written anew at every refresh and read again in place. A head that is tied
to the embeddings is served as a matrix of its own: on a CPU vLLM keeps a packed copy of the head,
which reading again does not replace where the two are tied.
"""

from __future__ import annotations

import copy
import os
import secrets
import shutil
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from motley.clock import Clock, Deadline, RealClock
from motley.config.peers import OpenAI, Vllm
from motley.engines.engine import Completion
from motley.engines.openai import Body, Client, OpenAIEngine
from motley.models.four_bits import FourBitLinear
from motley.models.policy import Policy, merged_weight
from motley.records import Sampling

WEIGHTS = "model.safetensors"
LOG_LINES = 8
POLL_S = 0.5
STOP_S = 20.0
GPU_SHARE = 0.4  # of the memory: the trainer lives on the same GPU
# vLLM serves these with a head of their own where told so
UNTIED = {"llama", "mistral", "qwen2", "qwen3", "granite", "gemma3_text"}
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    # its engine's process: one that is forked after torch has computed can wait forever
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
HAS_VLLM = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"

# Runs a command in a session of its own, and ends all of it when our end of its standard input
# closes, which it does even if we are killed.
KEEPER = """
import os, signal, subprocess, sys, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
heed = lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL)
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=heed)
def watch():
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGTERM)
    threading.Event().wait(10)
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=watch, daemon=True).start()
print("exit status", child.wait(), flush=True)
os.killpg(0, signal.SIGKILL)
"""


class VllmEngine:
    """`follows` is always true: sampling is with the weights of the last refresh."""

    follows = True
    keeps_snapshot = True

    def __init__(
        self, policy: Policy, config: Vllm, folder: Path, clock: Clock = RealClock()
    ) -> None:
        """`folder`: for the weights, as large as the model, and the server's log."""
        self._policy = policy
        self._config = config
        self._clock = clock
        self._folder = folder.absolute() / "vllm"
        self._python = config.python or sys.executable
        self._reloads = can_reload(policy)
        _check_python(self._python)
        write_model(policy, self._folder)
        self._start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def refresh(self) -> None:
        write_model(self._policy, self._folder)
        if not self._reloads:
            self.close()
            self._start()
            return
        self._control("collective_rpc", {"method": "reload_weights"})
        reset = msgspec.json.decode(self._control("reset_prefix_cache", {}))
        if not reset["success"]:
            raise RuntimeError(
                "vLLM kept its prefix cache, which is of the old weights, because requests were "
                "running; sample, then refresh"
            )

    def sample(
        self, prompts: Sequence[Sequence[int]], num_samples: int, sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        try:
            return self._engine.sample(prompts, num_samples, sampling, seed)
        except ConnectionError as error:
            raise self._broken(error) from error

    def close(self) -> None:
        self._finalizer()

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> None:
        # a server that got our port first has another name
        self._port, self._name = _free_port(), f"motley-{secrets.token_hex(4)}"
        log = self._folder / "server.log"
        self._process = _keep(
            self._command(), server_environment(self._policy, self._config, os.environ), log
        )
        self._finalizer = weakref.finalize(self, _stop, self._process)
        try:
            self._wait()
            self._engine = OpenAIEngine(
                self._policy, OpenAI(url=f"{self.url}/v1", model=self._name), self._folder
            )
        except BaseException:
            self.close()
            raise

    def _command(self) -> list[str]:
        fixed = {
            "model": self._folder,
            "served-model-name": self._name,
            "host": "127.0.0.1",
            "port": self._port,
        }
        chosen = {
            "logprobs-mode": "processed_logprobs",
            "generation-config": "vllm",
            "dtype": str(self._policy.dtype).split(".")[1],
        }
        if self._policy.device.type == "cuda":
            chosen["gpu-memory-utilization"] = str(GPU_SHARE)
        switches = ["--skip-tokenizer-init"]
        if self._policy.device.type != "cuda":
            # A prompt that is read in pieces takes a seeded request's random numbers back, which a
            # CPU's generator cannot: the server dies.
            switches += ["--enforce-eager", "--no-enable-chunked-prefill"]
        options = [
            part for name, value in (fixed | chosen).items() for part in (f"--{name}", str(value))
        ]
        return [
            self._python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *options,
            *switches,
            *self._config.args,
        ]

    def _wait(self) -> None:
        client = Client(self.url, timeout_s=5.0)
        deadline = Deadline(self._clock, self._config.start_s)
        while not deadline.passed:
            if self._process.poll() is not None:
                raise ValueError(
                    "vLLM ended before it was ready; change what it dislikes, see engine.vllm "
                    f"args. {self._last_words()}"
                )
            try:
                client.ask_once("health")
                return
            except OSError:  # not yet
                self._clock.sleep_s(POLL_S)
        raise TimeoutError(
            f"vLLM was not ready within start_s={self._config.start_s:g}; raise it. "
            f"{self._last_words()}"
        )

    def _control(self, path: str, body: Body) -> bytes:
        try:
            return Client(self.url).ask_once(path, body)
        except ConnectionError as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> ConnectionError:
        return ConnectionError(
            f"the vLLM server beside the peer failed: {error}. {self._last_words()}"
        )

    def _last_words(self) -> str:
        log = self._folder / "server.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return "\n".join([f"From {log}:", *quote(lines)])


def quote(lines: Sequence[str]) -> list[str]:
    """The errors a log names, and its end; vLLM goes on to say much after what went wrong."""
    said = [line for line in lines if "leaked" not in line and "nanobind" not in line]
    errors = dict.fromkeys(line.rpartition("] ")[2] for line in said if "Error: " in line)
    return [*list(errors)[:LOG_LINES], "...", *said[-LOG_LINES:]]


def can_reload(policy: Policy) -> bool:
    """Whether a running server can take new weights.

    A tied head that it cannot serve untied is one it would keep: then it starts anew.
    """
    return not _is_tied(policy.base) or policy.base.config.model_type in UNTIED


def _is_tied(model: PreTrainedModel) -> bool:
    return bool(model.config.get_text_config().tie_word_embeddings)


@torch.no_grad()
def write_model(policy: Policy, folder: Path) -> None:
    """Write the policy for vLLM; a reader of the folder sees the old weights or the new ones."""
    folder.mkdir(parents=True, exist_ok=True)
    model, config = policy.base, copy.deepcopy(policy.base.config)
    tensors = merged_tensors(model)
    head = "lm_head.weight"
    if _is_tied(model):
        tensors.pop(head, None)
        if can_reload(policy):
            config.tie_word_embeddings = False
            tensors[head] = model.get_input_embeddings().weight.detach().clone()
    config.save_pretrained(folder)
    fresh = folder / f"{WEIGHTS}.new"
    on_disk = revert_weight_conversion(model, tensors)  # vLLM knows the names that are saved
    save_file(
        {name: tensor.contiguous().cpu() for name, tensor in on_disk.items()},
        fresh,
        metadata={"format": "pt"},
    )
    os.replace(fresh, folder / WEIGHTS)


def merged_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """What the model acts with under its ordinary names.

    LoRA adapters are added to the weights they stand beside; those in 4 bits are made in full.
    """
    in_four_bits = {
        name: part for name, part in model.named_modules() if isinstance(part, FourBitLinear)
    }
    packed = {f"{name}.{part}" for name in in_four_bits for part in ("code", "scale")}
    weights = {
        name.replace(".base_layer.", "."): t
        for name, t in model.state_dict().items()
        if ".lora_" not in name and name not in packed
    }
    for name, part in in_four_bits.items():
        weights[f"{name.removesuffix('.base_layer')}.weight"] = part.four_bits.full(torch.float32)
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):
            if not isinstance(module.base_layer, FourBitLinear) and not hasattr(
                module.base_layer, "weight"
            ):
                raise ValueError(
                    f"vllm is not given adapters on experts such as {name}; name lora targets that "
                    "are linear layers, such as q_proj and v_proj"
                )
            weights[f"{name}.weight"] = merged_weight(module)
    return weights


def server_environment(policy: Policy, config: Vllm, ours: Mapping[str, str]) -> dict[str, str]:
    """Ours, with what vLLM needs, on the policy's own GPU.

    Our packages are not for another interpreter.
    """
    own = {
        name: value
        for name, value in ours.items()
        if not (config.python and name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"))
    }
    if policy.device.type == "cuda":
        visible = ours.get("CUDA_VISIBLE_DEVICES", "")
        place = policy.device.index or 0
        own["CUDA_VISIBLE_DEVICES"] = visible.split(",")[place] if visible else str(place)
    return ENVIRONMENT | own


def _check_python(python: str) -> None:
    remedy = (
        "install it in an environment of its own (python -m venv vllm-env; vllm-env/bin/pip "
        "install vllm) and set engine.vllm python to it"
    )
    if shutil.which(python) is None:
        raise ValueError(
            f"engine.vllm python={python!r} is no program; set it to the interpreter that has "
            f"vllm, or {remedy}"
        )
    if subprocess.run(
        [python, "-c", HAS_VLLM], stdin=subprocess.DEVNULL, capture_output=True
    ).returncode:
        raise ValueError(f"{python} has no vllm; {remedy}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _keep(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", KEEPER, *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the keeper and with it everything it started."""
    hold: IO[bytes] | None = process.stdin
    assert hold is not None
    hold.close()
    process.wait(STOP_S)
