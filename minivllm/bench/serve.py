"""minivllm bench serve: what the clients of a server see while it is under load. Any server with OpenAI's completions API.

    --request-rate 2,4,8       open loop: requests come when they come (Poisson), however the server does, as people do
    --max-concurrency 1,8,32   closed loop: so many clients, each sends its next request when its last is answered

TTFT counts from when a request was *due*: an open-loop client that waits for the server would hide the queue it causes.
Token times are arrivals at the client. Lists are measured one after another; the plot shows latency against load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from minivllm.bench import metrics, workloads
from minivllm.bench.http_stream import HttpError, post_events
from minivllm.bench.report import device_info, device_line, write_json
from minivllm.bench.workloads import Workload, WorkloadRequest
from minivllm.observe.trace import RequestRecord, Trace

LATENCIES = ("ttft", "tpot", "itl", "e2e")
LATE_SECONDS = 0.05  # a client that sends later than this is itself the bottleneck


@dataclass(frozen=True)
class Target:
    """Whom to ask, and how. extra: further fields of each request."""

    url: str
    model: str
    headers: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Run:
    """One measured load. `trace` holds the requests as the clients saw them."""

    request_rate: float | None
    max_concurrency: int | None
    trace: Trace = field(default_factory=Trace)
    errors: list[str] = field(default_factory=list)
    max_lateness: float = 0.0

    @property
    def load(self) -> str:
        return f"{self.request_rate:g} req/s" if self.request_rate is not None else f"{self.max_concurrency} clients"

    def result(self, slo: dict[str, float]) -> dict[str, Any]:
        served = metrics.served(self.trace)
        seconds = metrics.duration(self.trace)
        found: dict[str, Any] = {
            "request_rate": self.request_rate,
            "max_concurrency": self.max_concurrency,
            "num_requests": len(self.trace.requests),
            "num_served": len(served),
            "duration_s": seconds,
            "request_throughput": len(served) / seconds if seconds else math.nan,
            "output_throughput": metrics.output_throughput(self.trace),
            "cache_hit_rate": metrics.cache_hit_rate(self.trace),
            "max_lateness_s": self.max_lateness,
            "errors": self.errors[:5],
        }
        for name in LATENCIES:
            values = getattr(metrics, name)(self.trace)
            found[f"{name}_ms"] = asdict(metrics.summarize([value * 1000 for value in values]))
        if slo:
            found["slo_ms"] = {name: limit * 1000 for name, limit in slo.items()}
            found["goodput"] = asdict(metrics.goodput(self.trace, **slo))
        return found


async def run_load(
    target: Target, workload: Workload, *, request_rate: float | None = None, max_concurrency: int | None = None
) -> Run:
    """Send a workload and record every request. Open loop: requests are sent at their `arrival_s`, as `workloads.make(rate=)`
    sets it. In both, a turn of a conversation is sent after the turn before it was answered."""
    run = Run(request_rate, max_concurrency)
    room = asyncio.Semaphore(max_concurrency or len(workload))
    begin = time.perf_counter()
    num_open = Counter((r.group, r.turn) for r in workload.requests)
    ended = {turn: asyncio.Event() for turn in num_open}

    async def send(i: int, request: WorkloadRequest) -> None:
        if request_rate is not None:
            await asyncio.sleep(begin + request.arrival_s - time.perf_counter())
        due = request.arrival_s if request_rate is not None else 0.0
        before = ended.get((request.group, request.turn - 1))
        if before is not None:
            await before.wait()
            due = max(due, time.perf_counter() - begin)
        async with room:
            now = time.perf_counter() - begin
            if request_rate is None:
                due = now
            run.max_lateness = max(run.max_lateness, now - due)
            record = RequestRecord(f"{i}", arrival=due, group=request.group, turn=request.turn)
            run.trace.requests[record.request_id] = record
            try:
                await _ask(target, request, record, begin)
            except (HttpError, OSError) as error:
                record.finish, record.finish_reason = time.perf_counter() - begin, "error"
                run.errors.append(str(error) or type(error).__name__)
        num_open[request.group, request.turn] -= 1
        if num_open[request.group, request.turn] == 0:
            ended[request.group, request.turn].set()

    await asyncio.gather(*(send(i, request) for i, request in enumerate(workload.requests)))
    return run


async def _ask(target: Target, request: WorkloadRequest, record: RequestRecord, begin: float) -> None:
    prompt = request.prompt if request.prompt_token_ids is None else request.prompt_token_ids
    body = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.extra,
    }
    times: list[float] = []
    num_tokens = 0
    async for event in post_events(f"{target.url}/v1/completions", body, target.headers):
        now = time.perf_counter() - begin
        if "error" in event:
            raise HttpError(str(event["error"]))
        for choice in event.get("choices") or ():
            if choice.get("text") or not times:
                times.append(now)
            record.finish_reason = choice.get("finish_reason") or record.finish_reason
        if usage := event.get("usage"):
            num_tokens = usage["completion_tokens"]
            record.num_prompt_tokens = usage["prompt_tokens"]
            record.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if not times:
        raise HttpError("The answer had no token.")
    n = max(num_tokens, len(times))  # a chunk may bring several tokens: then they came together
    record.token_times = [times[i * len(times) // n] for i in range(n)]
    record.first_token, record.finish = times[0], times[-1]
    record.finish_reason = record.finish_reason or "stop"


# ---------------------------------------------------------------------- the command


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    loads = _loads(parser, args)
    slo = _slo(parser, args.slo)
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    url = args.base_url.rstrip("/").removesuffix("/v1")
    extra = {"ignore_eos": True} if args.ignore_eos else {}
    try:
        target = Target(url, args.model or _first_model(url, headers), headers, extra)
        # Other prompts at each load: the server may have those of the last one in its prefix cache.
        runs = [_measure(target, args, load, args.seed + 1000 * i) for i, load in enumerate(loads)]
    except OSError as error:
        print(f"minivllm: {url} does not answer: {error}", file=sys.stderr)
        return 1
    results = [run.result(slo) for run in runs]
    device = device_info()
    print(f"\n{target.model} at {url}, {args.workload}, {device_line(device)}\n")
    print(_table(runs, results))
    for run in runs:
        if run.errors:
            print(f"{run.load}: {len(run.errors)} requests failed, the first with: {run.errors[0]}", file=sys.stderr)
        if args.workload == "random" and metrics.cache_hit_rate(run.trace) > 0:
            print(f"{run.load}: the server had seen some of the prompts before: give another --seed.", file=sys.stderr)
        if run.max_lateness > LATE_SECONDS:
            print(
                f"{run.load}: requests were sent up to {run.max_lateness:.2f} s late: the client cannot keep up.",
                file=sys.stderr,
            )
    if args.json:
        settings = {name: getattr(args, name) for name in ("workload", "num_prompts", "input_len", "output_len", "seed")}
        data = {"benchmark": "serve", "model": target.model, "workload": settings, "device": device, "runs": results}
        write_json(args.json, data)
        print(f"Written to {args.json}")
    if args.plot:
        plot(runs, args.plot)
        print(f"Drawn to {args.plot}")
    return 1 if any(run.errors for run in runs) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minivllm bench serve", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="of the server, with or without /v1")
    parser.add_argument("--model", help="the first one it serves, if not given")
    parser.add_argument("--api-key")
    parser.add_argument(
        "--workload", default="random", help="random (equal lengths), a name of bench.workloads, or a .jsonl of one"
    )
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens of the random workload")
    parser.add_argument("--output-len", type=int, default=64, help="output tokens of the random workload")
    parser.add_argument("--vocab-size", type=int, default=workloads.DEFAULT_VOCAB_SIZE, help="random token ids are below it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--request-rate", metavar="R[,R...]", help="open loop: requests a second")
    parser.add_argument("--max-concurrency", metavar="N[,N...]", help="closed loop: clients (default: 8)")
    parser.add_argument("--slo", metavar="ttft:MS,tpot:MS", help="objectives in milliseconds (also e2e) for the goodput")
    parser.add_argument("--num-warmups", type=int, default=2, help="requests before the measured ones")
    parser.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="answers of full length")
    parser.add_argument("--json", metavar="FILE", help="write all figures and the device")
    parser.add_argument("--plot", metavar="FILE", help="draw latency against load")
    return parser


def _loads(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.request_rate and args.max_concurrency:
        parser.error("--request-rate is an open loop, --max-concurrency a closed one: give one of them")
    for name in ("num_prompts", "input_len", "output_len"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    try:
        if args.request_rate:
            loads: list[dict[str, Any]] = [{"request_rate": float(text)} for text in args.request_rate.split(",")]
        else:
            loads = [{"max_concurrency": int(text)} for text in (args.max_concurrency or "8").split(",")]
    except ValueError as error:
        parser.error(f"--request-rate and --max-concurrency are numbers, separated by commas: {error}")
    if any(not 0 < value < math.inf for load in loads for value in load.values()):
        parser.error("--request-rate and --max-concurrency must be above 0")
    return loads


def _slo(parser: argparse.ArgumentParser, text: str | None) -> dict[str, float]:
    """Seconds."""
    slo: dict[str, float] = {}
    for item in filter(None, (text or "").split(",")):
        name, _, value = item.partition(":")
        if name not in ("ttft", "tpot", "e2e"):
            parser.error(f"--slo knows ttft, tpot and e2e, not {name!r}")
        try:
            slo[name] = float(value) / 1000
        except ValueError:
            parser.error(f"--slo {name}:{value} is no number of milliseconds")
        if not 0 < slo[name] < math.inf:
            parser.error(f"--slo {name}:{value} must be above 0")
    return slo


def _first_model(url: str, headers: dict[str, str]) -> str:
    request = urllib.request.Request(f"{url}/v1/models", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])


def make_workload(args: argparse.Namespace, seed: int, rate: float | None) -> Workload:
    if args.workload.endswith(".jsonl"):
        return Workload.load(args.workload)
    if args.workload != "random":
        return workloads.make(args.workload, args.num_prompts, seed=seed, rate=rate)
    sizes = {"prompt_len": args.input_len, "max_tokens": args.output_len, "vocab_size": args.vocab_size}
    return workloads.make("fixed", args.num_prompts, seed=seed, rate=rate, **sizes)


def _measure(target: Target, args: argparse.Namespace, load: dict[str, Any], seed: int) -> Run:
    workload = make_workload(args, seed, load.get("request_rate"))
    for request in workload.requests[: args.num_warmups]:
        ids = request.prompt_token_ids
        backwards = None if ids is None else ids[::-1]  # a prompt that is none of those to come
        text = None if request.prompt is None else request.prompt[::-1]
        warm_up = Workload("warm-up", seed, [WorkloadRequest(text, backwards, min(2, request.max_tokens))])
        asyncio.run(run_load(target, warm_up, max_concurrency=1))
    run = asyncio.run(run_load(target, workload, **load))
    print(f"{run.load}: {len(metrics.served(run.trace))} of {len(workload)} requests served", file=sys.stderr, flush=True)
    return run


def _table(runs: list[Run], results: list[dict[str, Any]]) -> str:
    lines = [f"{'load':>12} {'out tok/s':>10} {'req/s':>7}   {'TTFT ms p50':>11} {'p99':>8}   {'TPOT ms p50':>11} {'p99':>8}"]
    lines[0] += f"   {'goodput':>16}" if "goodput" in results[0] else ""
    for run, result in zip(runs, results, strict=True):
        ttft, tpot = result["ttft_ms"], result["tpot_ms"]
        line = f"{run.load:>12} {result['output_throughput']:10.1f} {result['request_throughput']:7.2f}  "
        line += f" {ttft['p50']:11.1f} {ttft['p99']:8.1f}   {tpot['p50']:11.1f} {tpot['p99']:8.1f}"
        if good := result.get("goodput"):
            line += f"   {good['per_second']:6.2f}/s {good['share']:7.0%}"
        lines.append(line)
    return "\n".join(lines)


def plot(runs: list[Run], path: str | Path) -> None:
    """Latency against load; of a single load, each request by when it came. Raises ImportError naming the pip command."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ImportError("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    for ax, name, title in zip(axes, ("ttft", "tpot"), ("Time to first token", "Time per output token"), strict=True):
        ax.set_title(title)
        ax.set_ylabel("ms")
        if len(runs) == 1:
            served = metrics.served(runs[0].trace)
            points = [(r.arrival, getattr(r, name) * 1000) for r in served if getattr(r, name) is not None]
            ax.plot(*zip(*points, strict=True), "o", markersize=3) if points else None
            ax.set_xlabel(f"arrival, s ({runs[0].load})")
        else:
            loads = [run.request_rate or run.max_concurrency for run in runs]
            for p, marker in ((50, "o"), (90, "s"), (99, "^")):
                values = [metrics.percentile(getattr(metrics, name)(run.trace), p) * 1000 for run in runs]
                ax.plot(loads, values, marker=marker, label=f"p{p}")
            ax.set_xlabel("requests a second" if runs[0].request_rate else "clients")
            ax.legend()
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    raise SystemExit(main())
