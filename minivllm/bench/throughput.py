"""minivllm bench throughput: how many tokens a second the engine gives on a seeded workload. One engine, this process."""

from __future__ import annotations

import argparse
import time
from typing import Any

from minivllm.bench.report import device_info, device_line, summary, write_json
from minivllm.bench.workloads import uniform


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)

    from minivllm import LLM, SamplingParams

    begin = time.perf_counter()
    llm = LLM(
        model=args.model,
        dtype=args.dtype,
        load_format=args.load_format,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        enable_prefix_caching=False,
        generation_config="vllm",
    )
    start_seconds = time.perf_counter() - begin
    work = uniform(args.num_prompts, vocab_size=llm.model_config.vocab_size, seed=args.seed)
    params = [SamplingParams(temperature=0.0, max_tokens=r.output_len, ignore_eos=True) for r in work]
    prompts = [r.prompt_token_ids for r in work]
    total_in, total_out = sum(map(len, prompts)), sum(r.output_len for r in work)
    seconds = []
    for _ in range(args.rounds):
        first = time.perf_counter()
        llm.generate(prompts, params)
        seconds.append(time.perf_counter() - first)
    result = {
        "benchmark": "throughput",
        "model": args.model,
        "dtype": llm.dtype,
        "workload": {"name": f"uniform({args.num_prompts})", "seed": args.seed, "rounds": args.rounds},
        "device": device_info(),
        "start_seconds": start_seconds,
        "prompt_tokens": total_in,
        "output_tokens": total_out,
        "seconds": seconds,
        "tokens_per_second": summary([total_out / s for s in seconds]),
    }
    _print(result)
    if args.json:
        write_json(args.json, result)
        print(f"Written to {args.json}")
    return 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="minivllm bench throughput", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--load-format", default="auto", choices=("auto", "safetensors", "gguf", "dummy"))
    parser.add_argument("--max-num-seqs", type=int, default=None)
    parser.add_argument("--max-num-batched-tokens", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write medians, spread and the device")
    args = parser.parse_args(argv)
    if args.num_prompts < 1 or args.rounds < 1:
        parser.error("--num-prompts and --rounds must be at least 1")
    return args


def _print(result: dict[str, Any]) -> None:
    rate, total_out = result["tokens_per_second"], result["output_tokens"]
    every = rate["median"] * (result["prompt_tokens"] + total_out) / total_out
    print(f"{result['model']} ({result['dtype']}), {result['workload']['name']}, {device_line(result['device'])}")
    print(
        f"  output {rate['median']:.1f} tok/s (spread {rate['spread']:.0%}), all tokens {every:.1f} tok/s, started in"
        f" {result['start_seconds']:.1f} s"
    )


if __name__ == "__main__":
    raise SystemExit(main())
