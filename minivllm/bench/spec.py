"""minivllm bench spec: what speculative decoding gains and costs, by workload and by batch size. One process; the engines take
turns.

Engines that are compared run in turns, round after round, so that a busy moment of the machine hits all of them; the medians
are printed side by side, and the speed-up is against the same engine without drafts in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from minivllm.bench.report import device_info, device_line, summary, write_json

K = 3
METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": K},
    "eagle": {"method": "eagle", "num_speculative_tokens": K},
}
# Chat prompts, beside those of `spec_decode/prompts.py`.
CODE = (
    "Write a Python class Stack with push, pop, peek, is_empty and size, and a docstring for each method.",
    "Write Python functions that convert between celsius, fahrenheit and kelvin, one for each direction.",
    "Write an HTML table with the days of the week and a column for breakfast, lunch and dinner.",
    "Write a Python function that returns the larger of two numbers, then the same for three and for four numbers.",
)
WORKLOADS = ["repetitive", "code", "chat"]


def workload(name: str, num_prompts: int) -> list[str | list[dict[str, str]]]:
    """Texts to continue, or conversations. "repetitive" is what copying looks like (an edit, a quotation, a table): a passage
    three times, and its beginning once more."""
    from minivllm.bench.material import SENTENCES
    from minivllm.spec_decode.prompts import held_out_prompts

    if name == "repetitive":
        passages = [" ".join(sentences) for sentences in SENTENCES.values()]
        return [f"{p}\n\n{p}\n\n{p}\n\n{' '.join(p.split()[:6])}" for p in (passages * num_prompts)[:num_prompts]]
    texts = held_out_prompts(num_prompts, seed=1) if name == "chat" else [CODE[i % len(CODE)] for i in range(num_prompts)]
    return [[{"role": "user", "content": text}] for text in texts]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="minivllm bench spec", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), help="(default: all)")
    parser.add_argument("--speculative-config", metavar="JSON", help='one more method, as "custom"')
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS, choices=WORKLOADS, help="(default: all)")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1], help="requests at once (default: 1)")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--num-prompts", type=int, default=4, help="of a workload, at least the batch size")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--json", metavar="FILE", help="write medians, spread and the device")
    args = parser.parse_args(argv)
    if min(args.batch_sizes) < 1 or args.rounds < 1 or args.num_prompts < 1 or args.max_tokens < 2:
        parser.error("--batch-sizes, --rounds and --num-prompts must be at least 1, --max-tokens at least 2")
    methods = {name: METHODS[name] for name in args.methods}
    if args.speculative_config:
        methods["custom"] = json.loads(args.speculative_config)

    from minivllm import LLM

    common = {"dtype": args.dtype, "max_num_seqs": max(args.batch_sizes), "max_model_len": 2048, "enable_prefix_caching": False}
    engines = {name: LLM(args.model, speculative_config=config, **common) for name, config in methods.items()}
    device = device_info()
    print(f"{args.model} ({next(iter(engines.values())).dtype}), k={K}, {device_line(device)}")
    print("output tok/s, medians; tokens per verification; acceptance by position; seconds drafting / all")
    results = []
    for name in args.workloads:
        for size in args.batch_sizes:
            results += compare(engines, name, size, args)
    if args.json:
        write_json(args.json, {"benchmark": "spec", "model": args.model, "device": device, "k": K, "results": results})
        print(f"Written to {args.json}")
    return 0


def compare(engines: dict[str, Any], name: str, size: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All engines on one workload at one batch size, in turns."""
    prompts = workload(name, max(args.num_prompts, size))
    rates: dict[str, list[float]] = {engine: [] for engine in engines}
    parts: dict[str, tuple[float, float]] = dict.fromkeys(engines, (0.0, 0.0))
    for llm in engines.values():
        if llm.spec_decode_stats is not None:
            llm.spec_decode_stats.reset()
    for _ in range(args.rounds):
        for engine, llm in engines.items():
            before = 0.0 if llm.spec_decode_stats is None else llm.spec_decode_stats.draft_s
            seconds, num_tokens = timed(llm, prompts, size, args)
            after = 0.0 if llm.spec_decode_stats is None else llm.spec_decode_stats.draft_s
            rates[engine].append(num_tokens / seconds)
            parts[engine] = parts[engine][0] + after - before, parts[engine][1] + seconds
    base = summary(next(iter(rates.values())))["median"]
    found = []
    for engine, llm in engines.items():
        rate, stats = summary(rates[engine]), llm.spec_decode_stats
        entry: dict[str, Any] = {"workload": name, "batch_size": size, "method": engine, "tokens_per_second": rate}
        line = f"  {name:11} n={size:<3} {engine:7} {rate['median']:7.1f}  x{rate['median'] / base:4.2f}"
        if stats is not None:
            draft_s, seconds = parts[engine]
            entry |= {"tokens_per_step": stats.tokens_per_step, "acceptance": stats.acceptance}
            entry |= {"draft_s": draft_s, "seconds": seconds}
            by_position = " ".join(f"{share:.0%}" for share in stats.acceptance)
            line += f"  {stats.tokens_per_step:.2f}  {by_position:12}  {draft_s:.1f} / {seconds:.1f}"
        print(line, flush=True)
        found.append(entry)
    return found


def timed(llm: Any, prompts: list[Any], size: int, args: argparse.Namespace) -> tuple[float, int]:
    """Seconds and output tokens of the prompts, `size` at a time. The end token is ignored: all engines do the same work."""
    from minivllm import SamplingParams

    num_tokens, start = 0, time.perf_counter()
    for i in range(0, len(prompts), size):
        part = prompts[i : i + size]
        run = llm.generate if isinstance(part[0], str) else llm.chat
        params = SamplingParams(temperature=args.temperature, seed=0, max_tokens=args.max_tokens, ignore_eos=True)
        for output in run(part, params, use_tqdm=False):
            num_tokens += len(output.outputs[0].token_ids)
    return time.perf_counter() - start, num_tokens


if __name__ == "__main__":
    raise SystemExit(main())
