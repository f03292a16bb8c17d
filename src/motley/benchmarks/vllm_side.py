"""vLLM's side of the GPU benchmark. It runs in an environment of its own, which has vLLM and not
Motley: so it imports nothing of ours.

Asked by a JSON object on standard input, it writes one to the file that it names.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    asked = json.load(sys.stdin)
    engine = LLM(
        model=asked["model"],
        skip_tokenizer_init=True,
        dtype=asked["dtype"],
        max_model_len=asked["positions"],
        max_num_seqs=len(asked["prompts"]),  # all at once, as ours
        gpu_memory_utilization=asked["memory_share"],
        enable_prefix_caching=True,  # a prompt's samples share it
    )
    prompts = [{"prompt_token_ids": tokens} for tokens in asked["prompts"]]
    # no text is asked for: that is quicker. Log-probs of what was drawn, which training needs, are
    # asked for in the second of two ways, in the form that costs least
    seconds, tokens = [], []
    for logprobs in ({}, {"logprobs": 0, "flat_logprobs": True}):
        params = [
            SamplingParams(
                temperature=1.0, max_tokens=limit, ignore_eos=True, detokenize=False, **logprobs
            )
            for limit in asked["limits"]
        ]
        times = []
        for _ in range(1 + asked["repeats"]):
            start = time.perf_counter()
            made = engine.generate(prompts, params, use_tqdm=False)
            times.append(time.perf_counter() - start)
            engine.reset_prefix_cache()  # in training the weights are others at the next call
        seconds.append(statistics.median(times[1:]))
        tokens.append(sum(len(one.outputs[0].token_ids) for one in made))
    said = {"seconds": seconds[0], "logprobs_seconds": seconds[1], "tokens": min(tokens)}
    Path(asked["answer"]).write_text(json.dumps(said))


if __name__ == "__main__":
    main()
