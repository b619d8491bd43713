"""minivllm bench compare: our engine beside its peers, same model, same prompts, same machine, taking turns.

Every run is a fresh process (nobody inherits the other's warm memory), rounds alternate the engines (a slow minute of the
machine hits all of them), and the medians are compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from minivllm.bench.report import device_info, device_line, summary, write_json
from minivllm.bench.workloads import uniform

PEERS = ("transformers",)


def run_engine(engine: str, spec: dict[str, Any]) -> dict[str, Any]:
    """One measured run in a fresh process. The child's stderr (progress, warnings) is the user's; stdout is the result.

    Raises RuntimeError if the child fails."""
    command = [sys.executable, "-m", "minivllm.bench.peers", engine]
    done = subprocess.run(command, input=json.dumps(spec), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"{engine} failed with exit code {done.returncode}; its message is above. Command: {' '.join(command)}"
        )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def compare(
    model: str, peers: list[str], num_prompts: int, *, rounds: int = 3, dtype: str = "auto", seed: int = 0
) -> dict[str, Any]:
    """Measure and return {device, workload, engines: {name: {tokens_per_second: {median, ...}, runs}}, ratios}."""
    from minivllm.models.hub import resolve_model
    from minivllm.models.registry import ModelConfig

    folder = resolve_model(model)
    vocab_size = ModelConfig.from_folder(folder).vocab_size
    work = uniform(num_prompts, vocab_size=vocab_size, seed=seed)
    spec = {
        "model": str(folder),
        "dtype": dtype,
        "prompts": [r.prompt_token_ids for r in work],
        "output_lens": [r.output_len for r in work],
        "ignore_eos": True,
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ["minivllm", *peers]}
    for turn in range(rounds):
        for name in runs:
            result = run_engine(name, spec)
            spec["dtype"] = result["dtype"]  # "auto" is ours to choose, once; the peers get the same
            result.pop("token_ids")
            result["tokens_per_second"] = result["output_tokens"] / result["seconds"]
            runs[name].append(result)
            print(
                f"round {turn + 1}/{rounds}  {name:14} {result['tokens_per_second']:8.1f} output tok/s"
                f"  ({result['output_tokens']} tokens in {result['seconds']:.1f} s, start {result['start_seconds']:.1f} s)",
                file=sys.stderr,
                flush=True,
            )
    engines = {
        name: {
            "version": rs[0]["version"],
            "dtype": rs[0]["dtype"],
            "tokens_per_second": summary([r["tokens_per_second"] for r in rs]),
            "start_seconds": summary([r["start_seconds"] for r in rs]),
            "runs": rs,
        }
        for name, rs in runs.items()
    }
    ours = engines["minivllm"]["tokens_per_second"]["median"]
    return {
        "benchmark": "compare",
        "model": model,
        "workload": {"name": f"uniform({num_prompts})", "seed": seed, "num_prompts": num_prompts, "rounds": rounds},
        "device": device_info(),
        "engines": engines,
        "ratio_of_medians": {p: ours / engines[p]["tokens_per_second"]["median"] for p in peers},
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="minivllm bench compare", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--peers", default="transformers", help=f"comma-separated, of: {', '.join(PEERS)}")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each engine, taking turns")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write medians, spread, every run and the device")
    args = parser.parse_args(argv)
    peers = [p for p in args.peers.split(",") if p]
    if unknown := [p for p in peers if p not in PEERS]:
        parser.error(f"unknown peer {unknown[0]!r}; there are: {', '.join(PEERS)}")
    if args.num_prompts < 1 or args.rounds < 1:
        parser.error("--num-prompts and --rounds must be at least 1")
    result = compare(args.model, peers, args.num_prompts, rounds=args.rounds, dtype=args.dtype, seed=args.seed)
    print(f"\n{args.model}, {result['workload']['name']}, greedy, {device_line(result['device'])}")
    for name, engine in result["engines"].items():
        rate = engine["tokens_per_second"]
        ratio = f"  minivllm is {result['ratio_of_medians'][name]:.2f}x" if name in result["ratio_of_medians"] else ""
        label = f"{name} {engine['version']}"
        print(f"  {label:22} {engine['dtype']:9} {rate['median']:7.1f} output tok/s (spread {rate['spread']:.0%}){ratio}")
    if args.json:
        write_json(args.json, result)
        print(f"Written to {args.json}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
