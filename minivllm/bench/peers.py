"""One engine, one workload, one fresh process: the child side of every comparison.

    python -m minivllm.bench.peers ENGINE < spec.json > result.json

The spec names the model folder, the dtype, the prompts (token ids) and output lengths. Loading and one small warm-up are
outside the measured time; both engines start from token ids and end with token ids, so that tokenizers do not count.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

Result = dict[str, Any]
WARM_UP_TOKENS = 4


def run_minivllm(spec: dict[str, Any]) -> Result:
    """Our engine, through the public offline API."""
    import minivllm
    from minivllm import LLM, SamplingParams

    begin = time.perf_counter()
    llm = LLM(
        model=spec["model"],
        dtype=spec["dtype"],
        enable_prefix_caching=False,  # the prompts share nothing; the peers' caches are off as well
        max_num_seqs=max(64, min(256, len(spec["prompts"]))),
        generation_config="vllm",
    )
    started = time.perf_counter()
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=spec["ignore_eos"]) for n in spec["output_lens"]]
    llm.generate([spec["prompts"][0][:16]], SamplingParams(temperature=0.0, max_tokens=WARM_UP_TOKENS), use_tqdm=False)
    first = time.perf_counter()
    outputs = llm.generate(spec["prompts"], params, use_tqdm=spec.get("progress", False))
    done = time.perf_counter()
    return {
        "engine": "minivllm",
        "version": minivllm.__version__,
        "dtype": llm.dtype,
        "start_seconds": started - begin,
        "seconds": done - first,
        "output_tokens": sum(len(o.outputs[0].token_ids) for o in outputs),
        "token_ids": [o.outputs[0].token_ids for o in outputs],
    }


def run_transformers(spec: dict[str, Any]) -> Result:
    """transformers' `generate` on one left-padded static batch. Only useful tokens count: those a request asked for."""
    import torch
    import transformers

    begin = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(spec["model"], dtype=getattr(torch, spec["dtype"])).eval()
    if torch.cuda.is_available():
        model = model.to("cuda")
    started = time.perf_counter()
    pad = model.config.pad_token_id or 0
    end = None if spec["ignore_eos"] else model.generation_config.eos_token_id

    def generate(prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
        settings = transformers.GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=end, pad_token_id=pad, use_cache=True
        )
        out = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
        return [row[width:] for row in out.tolist()]

    model.generation_config = transformers.GenerationConfig()  # its sampling defaults are not part of the comparison
    with torch.inference_mode():
        generate([spec["prompts"][0][:16]], WARM_UP_TOKENS)
        first = time.perf_counter()
        rows = generate(spec["prompts"], max(spec["output_lens"]))
        done = time.perf_counter()
    ends = {end} if isinstance(end, int) else set(end or ())
    useful = [_until_end(row[:n], ends) for row, n in zip(rows, spec["output_lens"], strict=True)]
    return {
        "engine": "transformers",
        "version": transformers.__version__,
        "dtype": spec["dtype"],
        "start_seconds": started - begin,
        "seconds": done - first,
        "output_tokens": sum(map(len, useful)),
        "token_ids": useful,
    }


def _until_end(row: list[int], ends: set[int]) -> list[int]:
    """A row up to and including its first end token."""
    for i, token in enumerate(row):
        if token in ends:
            return row[: i + 1]
    return row


ENGINES: dict[str, Callable[[dict[str, Any]], Result]] = {"minivllm": run_minivllm, "transformers": run_transformers}


def main() -> None:
    spec = json.load(sys.stdin)
    result = ENGINES[sys.argv[1]](spec)
    import resource  # Unix; peak memory is a bonus figure

    result["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
