"""minivllm bench compare: our engine beside its peers, same model, same prompts, same machine, taking turns.

Every engine is loaded once, in a process of its own and, if given, with its own interpreter, and then waits. In each round each
runs the workload, one after another, so that a slow minute of the machine hits all of them; ratios are taken within a round.

    --num-prompts 1 8 32      so many requests at once; for fewer than eight, eight requests are run so many at a time
    --peer-python vllm=/somewhere/venv/bin/python
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minivllm.bench import peers as child
from minivllm.bench.report import device_info, device_line, summary, write_json
from minivllm.bench.workloads import uniform

PEERS = ("transformers", "vllm", "llama.cpp")
OURS, OURS_INT4 = "minivllm", "minivllm int4"
FEWEST = 8  # requests of a workload: a single one is over too soon to be measured


class EngineProcess:
    """An engine that was started and waits for work. Raises ValueError if it does not start, or ends; its message is on our
    stderr."""

    def __init__(self, name: str, spec: dict[str, Any], python: str | None = None) -> None:
        self.name = name
        engine = OURS if name == OURS_INT4 else name
        module = ["-m", child.__name__] if python is None else [str(Path(child.__file__).resolve())]
        self._command = [python or sys.executable, *module, engine]
        try:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise ValueError(f"{name} does not start: {error}. Give the path of a Python interpreter.") from error
        self.about = self.ask(spec | ({"quantization": "int4"} if name == OURS_INT4 else {}))

    def ask(self, work: dict[str, Any]) -> dict[str, Any]:
        """Its answer to a line of work (see peers.py)."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # its end is reported below
            print(json.dumps(work), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise ValueError(
                f"{self.name} ended with exit code {code}; its message is above. Command: {' '.join(self._command)}"
            )
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise ValueError(
                f"{self.name} said {line.strip()!r:.80} where its answer was due. It was started as: {' '.join(self._command)}"
            ) from None
        return answer

    def close(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # what it left unread; its end has been reported
                self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def run_engine(engine: str, spec: dict[str, Any]) -> dict[str, Any]:
    """One batch in one engine, from start to end: its `about` and its result in one."""
    prompts = spec["prompts"]
    process = EngineProcess(engine, {**spec, "max_num_seqs": len(prompts), "prompts": None})
    try:
        work = {"prompts": prompts, "output_lens": spec["output_lens"], "at_once": len(prompts)}
        return process.about | process.ask(work)
    finally:
        process.close()


def workload(size: int, vocab_size: int, seed: int) -> dict[str, Any]:
    """W(size): the line of work that peers.py takes."""
    requests = uniform(max(size, FEWEST), vocab_size=vocab_size, seed=seed)
    return {
        "prompts": [request.prompt_token_ids for request in requests],
        "output_lens": [request.output_len for request in requests],
        "at_once": size,
    }


def takes_part(engine: str, size: int) -> bool:
    """llama.cpp's Python interface runs one sequence at a time."""
    return engine != "llama.cpp" or size == 1


def start(
    model: str, peers: list[str], sizes: list[int], *, dtype: str, int4: bool, pythons: dict[str, str], gguf: str | None
) -> dict[str, EngineProcess]:
    """All engines, one after another. "auto" is ours to choose, once; the peers get the same dtype."""
    names = [OURS, *([OURS_INT4] if int4 else []), *peers]
    spec = {"model": model, "dtype": dtype, "max_num_seqs": max(64, *sizes), "ignore_eos": True, "gguf": gguf}
    spec["share_of_gpu"] = 0.9 / len(names)  # all of them stay
    engines: dict[str, EngineProcess] = {}
    try:
        for name in names:
            engines[name] = EngineProcess(name, spec, pythons.get(name))
            about = engines[name].about
            print(f"{name} {about['version']}: started in {about['start_seconds']:.1f} s", file=sys.stderr, flush=True)
            if name == OURS:
                spec["dtype"] = about["dtype"]
    except BaseException:
        for engine in engines.values():
            engine.close()
        raise
    return engines


def measure(
    engines: dict[str, EngineProcess],
    works: dict[int, dict[str, Any]],
    rounds: int,
    before_round: Callable[[], None] = lambda: None,
) -> dict[int, dict[str, list[dict[str, Any]]]]:
    """The runs, by workload and engine: in each round, each engine in turn."""
    runs: dict[int, dict[str, list[dict[str, Any]]]] = {
        size: {name: [] for name in engines if takes_part(name, size)} for size in works
    }
    for turn in range(rounds):
        before_round()
        for size, work in works.items():
            for name in runs[size]:
                result = engines[name].ask(work)
                del result["token_ids"]
                result["tokens_per_second"] = result["output_tokens"] / result["seconds"]
                runs[size][name].append(result)
                print(
                    f"round {turn + 1}/{rounds}  W({size})  {name:14} {result['tokens_per_second']:8.1f} output tok/s"
                    f"  ({result['output_tokens']} tokens in {result['seconds']:.1f} s)",
                    file=sys.stderr,
                    flush=True,
                )
                time.sleep(0.3)  # an engine's threads spin for a moment after their work
    return runs


def report(engines: dict[str, EngineProcess], runs: dict[int, dict[str, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Of each workload: medians and spread of each engine, and how many times its output ours is. A ratio is taken within each
    round, and these have a median: runs minutes apart are of two machines, when neighbours come and go."""
    found = []
    for size, by_engine in runs.items():
        entries = {
            name: {
                **engines[name].about,
                "tokens_per_second": summary([run["tokens_per_second"] for run in results]),
                "peak_rss_bytes": max(run["peak_rss_bytes"] for run in results),
                "runs": results,
            }
            for name, results in by_engine.items()
        }
        ours = [run["tokens_per_second"] for run in by_engine[OURS]]
        ratios = {}
        for name, results in by_engine.items():
            if name != OURS:
                pairs = zip(ours, results, strict=True)
                ratios[name] = summary([mine / theirs["tokens_per_second"] for mine, theirs in pairs])
        found.append({"num_prompts": size, "engines": entries, "ratios": ratios})
    return found


def compare(
    model: str,
    peers: list[str],
    sizes: list[int],
    *,
    rounds: int = 3,
    dtype: str = "auto",
    seed: int = 0,
    int4: bool = False,
    pythons: dict[str, str] | None = None,
    gguf: str | None = None,
) -> dict[str, Any]:
    """Measure and return {device, workloads: [{num_prompts, engines: {name: {tokens_per_second, ...}}, ratios}]}."""
    from minivllm.models.hub import resolve_model
    from minivllm.models.registry import ModelConfig

    folder = resolve_model(model)
    vocab_size = ModelConfig.from_folder(folder).vocab_size
    works = {size: workload(size, vocab_size, seed) for size in sizes}
    engines = start(str(folder), peers, sizes, dtype=dtype, int4=int4, pythons=pythons or {}, gguf=gguf)
    try:
        runs = measure(engines, works, rounds)
    finally:
        for engine in engines.values():
            engine.close()
    return {
        "benchmark": "compare",
        "model": model,
        "workload": {"name": "uniform", "seed": seed, "rounds": rounds},
        "device": device_info(),
        "workloads": report(engines, runs),
    }


def render(result: dict[str, Any]) -> str:
    """A table a workload."""
    lines = [f"{result['model']}, uniform prompts, greedy, {device_line(result['device'])}"]
    for part in result["workloads"]:
        lines.append(f"W({part['num_prompts']})")
        for name, engine in part["engines"].items():
            rate, ratio = engine["tokens_per_second"], part["ratios"].get(name)
            lines.append(
                f"  {name + ' ' + engine['version']:24} {engine['dtype']:9} {rate['median']:7.1f} output tok/s"
                f" (spread {rate['spread']:4.0%})"
                + (f"  minivllm is {ratio['median']:.2f}x ({ratio['min']:.2f}-{ratio['max']:.2f} by round)" if ratio else "")
            )
    return "\n".join(lines)


def plot(result: dict[str, Any], path: str | Path) -> None:
    """Medians as bars, a group a workload, every run a dot."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install matplotlib") from None
    parts = result["workloads"]
    figure = Figure(figsize=(3.2 * len(parts) + 0.8, 3.6), layout="constrained")
    hatches = ("", "//", "..", "xx", "\\\\")
    names = list(dict.fromkeys(name for part in parts for name in part["engines"]))
    for ax, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        for x, name in enumerate(part["engines"]):
            engine, i = part["engines"][name], names.index(name)
            rate = engine["tokens_per_second"]["median"]
            ax.bar(x, rate, color=f"C{i}", hatch=hatches[i % len(hatches)], edgecolor="white")
            ax.plot([x] * len(engine["runs"]), [run["tokens_per_second"] for run in engine["runs"]], "k_", markersize=12)
            ax.annotate(
                f"{rate:.0f}", (x, 0), xytext=(0, 4), textcoords="offset points", ha="center", color="white", weight="bold"
            )
        ax.set_xticks(range(len(part["engines"])), part["engines"], rotation=30, ha="right")
        ax.set_title(f"{part['num_prompts']} at once")
        ax.set_ylabel("output tokens a second")
    figure.suptitle(f"{result['model']}, {device_line(result['device'])}", fontsize=9)
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="minivllm bench compare", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--peers", default="transformers", help=f"comma-separated, of: {', '.join(PEERS)}")
    parser.add_argument("--peer-python", action="append", default=[], metavar="PEER=PYTHON", help="a peer's own interpreter")
    parser.add_argument("--gguf", metavar="FILE", help="the model as llama.cpp reads it")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--int4", action="store_true", help="our engine with quantization='int4', too")
    parser.add_argument("--num-prompts", type=int, nargs="+", default=[32], metavar="N", help="at once; several may be given")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each engine, taking turns")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write medians, spread, every run and the device")
    parser.add_argument("--plot", metavar="FILE", help="draw the medians and every run")
    args = parser.parse_args(argv)
    peers = [p for p in args.peers.split(",") if p]
    pythons = dict(entry.partition("=")[::2] for entry in args.peer_python)
    if unknown := [p for p in (*peers, *pythons) if p not in PEERS]:
        parser.error(f"unknown peer {unknown[0]!r}; there are: {', '.join(PEERS)}")
    if "llama.cpp" in peers and not (args.gguf and Path(args.gguf).is_file()):
        parser.error(f"llama.cpp needs --gguf FILE, and {args.gguf} is no file")
    if min(*args.num_prompts, args.rounds) < 1:
        parser.error("--num-prompts and --rounds must be at least 1")
    result = compare(
        args.model,
        peers,
        args.num_prompts,
        rounds=args.rounds,
        dtype=args.dtype,
        seed=args.seed,
        int4=args.int4,
        pythons=pythons,
        gguf=args.gguf,
    )
    print(f"\n{render(result)}")
    if args.json:
        write_json(args.json, result)
        print(f"Written to {args.json}")
    if args.plot:
        plot(result, args.plot)
        print(f"Drawn to {args.plot}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
