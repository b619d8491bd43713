"""One engine in a process of its own: the child side of every comparison.

    PYTHON minivllm/bench/peers.py ENGINE        stdin, stdout: a JSON object a line

The first line names the model, the dtype and how many sequences run at once at most; the answer comes when the engine is loaded
and warm. Each further line is a workload (prompts as token ids, output lengths, how many `at_once`), answered when it has run;
in between the engine waits and costs nothing. All begin with token ids and end with them, so that tokenizers do not count.

A peer may need an interpreter of its own, which has no minivllm: nothing is imported here before its engine needs it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Spec = dict[str, Any]
# One batch: prompts and output lengths -> token ids. An engine is its version, its dtype and a function that runs a batch.
Run = Callable[[list[list[int]], list[int]], list[list[int]]]
Engine = tuple[str, str, Run]
WARM_UP_TOKENS = 4


def start_minivllm(spec: Spec) -> Engine:
    """Our engine, through the public offline API."""
    import minivllm
    from minivllm import LLM, SamplingParams

    llm = LLM(
        model=spec["model"],
        dtype=spec["dtype"],
        quantization=spec.get("quantization"),
        enable_prefix_caching=False,  # the prompts share nothing; the peers' caches are off as well
        max_num_seqs=spec["max_num_seqs"],
        generation_config="vllm",
        **_share_of_gpu(spec),
    )

    def run(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=spec["ignore_eos"]) for n in lengths]
        outputs = llm.generate(prompts, params, use_tqdm=spec.get("progress", False))
        return [output.outputs[0].token_ids for output in outputs]

    return minivllm.__version__, llm.dtype, run


def _share_of_gpu(spec: Spec) -> dict[str, float]:
    """For engines that take a GPU's memory as theirs: they share it here."""
    import torch

    return {"gpu_memory_utilization": spec["share_of_gpu"]} if torch.cuda.is_available() and "share_of_gpu" in spec else {}


def start_transformers(spec: Spec) -> Engine:
    """transformers' `generate` on one left-padded static batch. Only useful tokens count: those a request asked for."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(spec["model"], dtype=getattr(torch, spec["dtype"])).eval()
    if torch.cuda.is_available():
        model = model.to("cuda")
    pad = model.config.pad_token_id or 0
    end = None if spec["ignore_eos"] else model.generation_config.eos_token_id
    ends = {end} if isinstance(end, int) else set(end or ())
    model.generation_config = transformers.GenerationConfig()  # its sampling defaults are not part of the comparison

    @torch.inference_mode()
    def run(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
        settings = transformers.GenerationConfig(
            max_new_tokens=max(lengths), do_sample=False, eos_token_id=end, pad_token_id=pad, use_cache=True
        )
        out = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
        rows = [row[width:] for row in out.tolist()]
        return [_until_end(row[:n], ends) for row, n in zip(rows, lengths, strict=True)]

    return transformers.__version__, spec["dtype"], run


def start_vllm(spec: Spec) -> Engine:
    """vLLM's offline API with its own defaults (torch.compile on), prefix caching and detokenization off."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import vllm

    llm = vllm.LLM(
        model=spec["model"],
        dtype=spec["dtype"],
        enable_prefix_caching=False,
        max_num_seqs=spec["max_num_seqs"],
        generation_config="vllm",
        **_share_of_gpu(spec),
    )

    def run(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        params = [
            vllm.SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=spec["ignore_eos"], detokenize=False) for n in lengths
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return vllm.__version__, spec["dtype"], run


def start_llama_cpp(spec: Spec) -> Engine:
    """llama.cpp on the GGUF file, through llama-cpp-python: one sequence after another, on all cores."""
    import llama_cpp

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    llm = llama_cpp.Llama(spec["gguf"], n_ctx=2048, n_threads=cores, n_threads_batch=cores, verbose=False)
    end = llm.token_eos()

    def run(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        rows = []
        for prompt, length in zip(prompts, lengths, strict=True):
            row: list[int] = []
            llm.reset()
            llm.eval(prompt)
            while True:
                row.append(llm.sample(temp=0.0))
                if len(row) == length or (row[-1] == end and not spec["ignore_eos"]):
                    break
                llm.eval(row[-1:])
            rows.append(row)
        return rows

    return llama_cpp.__version__, os.path.basename(spec["gguf"]).removesuffix(".gguf").rsplit(".", 1)[-1], run


def _until_end(row: list[int], ends: set[int]) -> list[int]:
    """A row up to and including its first end token."""
    for i, token in enumerate(row):
        if token in ends:
            return row[: i + 1]
    return row


ENGINES: dict[str, Callable[[Spec], Engine]] = {
    "minivllm": start_minivllm,
    "transformers": start_transformers,
    "vllm": start_vllm,
    "llama.cpp": start_llama_cpp,
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an engine prints goes to stderr
    begin = time.perf_counter()
    spec = json.loads(sys.stdin.readline())
    version, dtype, run = ENGINES[sys.argv[1]](spec)
    started = time.perf_counter() - begin
    run([list(range(100, 116))], [WARM_UP_TOKENS])
    print(json.dumps({"version": version, "dtype": dtype, "start_seconds": started}), file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        prompts, lengths, size = work["prompts"], work["output_lens"], work["at_once"]
        rows: list[list[int]] = []
        first = time.perf_counter()
        for i in range(0, len(prompts), size):
            rows += run(prompts[i : i + size], lengths[i : i + size])
        seconds = time.perf_counter() - first
        result = {"seconds": seconds, "output_tokens": sum(map(len, rows)), "token_ids": rows, "peak_rss_bytes": _peak_rss()}
        print(json.dumps(result), file=answers, flush=True)


def _peak_rss() -> int:
    """Of this process; an engine's own child processes are not in it."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    if not __package__:  # run by path: this folder's modules are none of the engine's
        sys.path.pop(0)
    main()
