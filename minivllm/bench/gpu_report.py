"""minivllm bench gpu-report: everything this engine claims of GPUs, checked and measured on the one that is here, in one file.

In under six minutes: the GPU's own limits, the tests in tests/gpu, the attention kernels' bandwidth, a decode step by batch
size (eager, as a CUDA graph, and compiled), and output tokens a second on the workload of nano-vllm's benchmark (256 requests,
100-1024 tokens in and as many out). Weights are random: it needs no network, and no package beyond the engine's. A part that
fails is written down, and the others go on.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.bench.report import device_info, device_line, write_json
from minivllm.bench.workloads import BenchRequest, uniform

if TYPE_CHECKING:
    import torch

    from minivllm.attention.interface import AttentionBackend
    from minivllm.llm import LLM
    from minivllm.worker.graphs import DecodeBuffers
    from minivllm.worker.model_runner import ModelRunner

ROOT = Path(__file__).resolve().parents[2]
MODEL = "Qwen/Qwen3-0.6B"
MAX_MODEL_LEN = 4096
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
COMPILED_BATCHES = (1, 64)  # a compilation each, of all layers
TIME_LIMIT = 330.0  # seconds, of the 360 promised
TESTS_LIMIT = 130.0
KERNELS_LIMIT = 100.0
COMPILING = 110.0  # seconds to leave for it, or it is left out
COLD = 256 << 20  # bytes: more than any GPU's cache, so that what is read comes from memory


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="minivllm bench gpu-report", description=__doc__)
    parser.add_argument("--model", default=MODEL, help="a name whose sizes are built in, or a folder with a config.json")
    parser.add_argument("--json", metavar="FILE", default="gpu-report.json", help="where it goes (default: %(default)s)")
    parser.add_argument("--part", choices=PARTS_APART, help=argparse.SUPPRESS)  # what a report runs in a process of its own
    parser.add_argument("--bandwidth", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    require_gpu()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    if args.part:
        write_json(args.json, PARTS_APART[args.part](args.model, args.bandwidth))
        return 0
    report = make_report(args.model, lambda report: write_json(args.json, report))
    print(f"Written to {args.json} after {report['seconds']:.0f} s.")
    failed = [name for name, part in report["parts"].items() if "error" in part]
    if failed:
        print(f"Not all is well: {', '.join(failed)}.", file=sys.stderr)
    return 1 if failed else 0


def require_gpu() -> None:
    """Raises ValueError where there is nothing to report on."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            "gpu-report needs an NVIDIA GPU and a CUDA build of torch, and torch sees none"
            f" (torch {torch.__version__}). What can be tested without one is in tests/attention and tests/worker."
        )


def make_report(model: str, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The whole report. `save` gets it after each part: what hangs or dies later takes nothing with it."""
    start = time.perf_counter()

    def seconds_left() -> float:
        return TIME_LIMIT - (time.perf_counter() - start)

    info = device_info()
    print(f"{model}, {device_line(info)}", flush=True)
    parts: dict[str, dict[str, Any]] = {}
    report = {
        "benchmark": "gpu-report",
        "model": model,
        "weights": "random",
        "device": info,
        "versions": _versions(),
        "parts": parts,
    }

    def keep(name: str, part: dict[str, Any]) -> None:
        parts[name], report["seconds"] = part, time.perf_counter() - start
        save(report)

    keep("device", _part("device", measure_limits))
    keep("tests", _part("tests", lambda: run_tests(min(TESTS_LIMIT, seconds_left()))))
    bandwidth = parts["device"].get("bandwidth_gb_s")
    keep("kernels", _part("kernels", lambda: in_own_process("kernels", model, bandwidth, KERNELS_LIMIT)))
    measure_engine(model, seconds_left, keep)
    return report


def in_own_process(part: str, model: str, bandwidth_gb_s: float | None, limit: float) -> dict[str, Any]:
    """A part of PARTS_APART. A CUDA error leaves its process useless, and a kernel may never end: the others go on."""
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "part.json"
        command = [sys.executable, "-m", "minivllm.bench.gpu_report", "--part", part, "--model", model, "--json", str(file)]
        if bandwidth_gb_s:
            command += ["--bandwidth", str(bandwidth_gb_s)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"{part} took more than {limit:.0f} s"}
        if not file.is_file():
            return {"error": f"{part} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"}
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return result


def _part(name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `run` returns with the time it took, or the error it ended with. One line of it is printed."""
    begin = time.perf_counter()
    try:
        result = run()
    except Exception as error:
        logging.getLogger("minivllm").debug("%s failed", name, exc_info=True)
        result = {"error": f"{type(error).__name__}: {error}"}
    result["seconds"] = time.perf_counter() - begin
    line = result.get("error") or result.get("line", "done")
    print(f"  {name:11} {line.splitlines()[0]} ({result['seconds']:.0f} s)", flush=True)
    return result


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "triton", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


# ---------------------------------------------------------------------- the GPU and the tests


def measure_limits() -> dict[str, Any]:
    """The ceilings that plain PyTorch reaches."""
    import torch

    from minivllm.sim.hardware import measure_device
    from minivllm.worker.device import choose_device, choose_dtype

    dtype = str(choose_dtype("auto", choose_device("cuda"))).removeprefix("torch.")
    limits = measure_device("cuda", dtype, seconds=2.0)
    torch.cuda.empty_cache()  # the tests are another process
    return {
        "bandwidth_gb_s": limits.bandwidth / 1e9,
        "matmul_tflop_s": limits.flops / 1e12,
        "launch_us": limits.launch_overhead * 1e6,
        "line": f"{limits.bandwidth / 1e9:.0f} GB/s, {limits.flops / 1e12:.0f} TFLOP/s in {dtype}",
    }


def run_tests(limit: float) -> dict[str, Any]:
    """tests/gpu, in a process of its own, because a CUDA error leaves its process useless."""
    folder = ROOT / "tests" / "gpu"
    if not folder.is_dir():
        return {"line": "not run: tests/gpu comes with a clone, not with the package"}
    if not all(map(importlib.util.find_spec, ("pytest", "hypothesis"))):
        return {"line": "not run: pip install pytest hypothesis"}
    with tempfile.TemporaryDirectory() as temporary:
        results = Path(temporary) / "results.xml"
        command = [sys.executable, "-m", "pytest", str(folder), "-v", "-m", "not slow", "-p", "no:cacheprovider"]
        if importlib.util.find_spec("xdist") and (os.cpu_count() or 1) > 4:  # most of the time goes into compiling kernels
            command += ["-n", "4"]
        try:
            done = subprocess.run(
                [*command, f"--junitxml={results}"], capture_output=True, text=True, cwd=ROOT, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired as error:
            return read_unfinished(error.stdout or "", limit)
        if not results.is_file():
            return {"error": f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"}
        return read_results(results.read_text(encoding="utf-8"))


def read_unfinished(shown: str | bytes, limit: float) -> dict[str, Any]:
    """What `pytest -v` had shown when its time was over."""
    text = shown.decode(errors="replace") if isinstance(shown, bytes) else shown
    counts = {outcome.lower(): len(re.findall(rf"\b{outcome}\b", text)) for outcome in ("PASSED", "FAILED", "SKIPPED")}
    told = ", ".join(f"{n} {outcome}" for outcome, n in counts.items())
    return {**counts, "error": f"tests/gpu took more than {limit:.0f} s; until then {told}"}


def read_results(junit_xml: str) -> dict[str, Any]:
    """Counts, and of each failed test its name and last words."""
    failed, counts = {}, {"passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.fromstring(junit_xml).iter("testcase"):
        trouble = [child for child in case if child.tag in ("failure", "error")]
        outcome = "failed" if trouble else "skipped" if case.find("skipped") is not None else "passed"
        counts[outcome] += 1
        if trouble:
            failed[f"{case.get('classname')}::{case.get('name')}"] = (trouble[0].get("message") or "")[:500]
    result: dict[str, Any] = {**counts, "line": ", ".join(f"{n} {outcome}" for outcome, n in counts.items())}
    if failed or not counts["passed"]:
        result["error"] = f"{result['line']}: {', '.join(failed) or 'nothing was tested'}"
        result["failures"] = failed
    return result


# ---------------------------------------------------------------------- kernels


def measure_kernels(
    model: str,
    bandwidth_gb_s: float | None,
    *,
    device: str = "cuda",
    batches: Sequence[tuple[int, int]] = ((1, 1024), (1, 16384), (8, 4096), (32, 1024), (128, 1024), (256, 1024)),
    prefills: Sequence[tuple[int, int]] = ((1, 1024), (8, 1024), (1, 8192)),
    seconds: float = 0.5,
) -> dict[str, Any]:
    """One layer's attention by (sequences, tokens of each): bandwidth of decode and write, arithmetic of prefill."""
    import torch

    from minivllm.attention import get_backend
    from minivllm.models.weights import load_config
    from minivllm.worker.device import choose_dtype

    config = load_config(model, load_format="dummy")
    dtype = choose_dtype("auto", torch.device(device)) if device == "cuda" else torch.float32
    backend = get_backend("triton", device, dtype)
    shape = (config.num_heads, config.num_kv_heads, config.head_dim)
    decodes = []
    for batch, length in batches:
        row = _measure_decode(backend, batch, length, shape, dtype, device, seconds)
        if bandwidth_gb_s:
            row["share_of_bandwidth"] = row["decode_gb_s"] / bandwidth_gb_s
        decodes.append(row)
    best = max(row["decode_gb_s"] for row in decodes)
    return {
        "heads": shape[0],
        "kv_heads": shape[1],
        "head_dim": shape[2],
        "dtype": str(dtype).removeprefix("torch."),
        "decode": decodes,
        "prefill": [_measure_prefill(backend, n, length, shape, dtype, device, seconds) for n, length in prefills],
        "line": f"decode up to {best:.0f} GB/s" + (f" of {bandwidth_gb_s:.0f}" if bandwidth_gb_s else ""),
    }


def _measure_decode(
    backend: AttentionBackend,
    batch: int,
    length: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: str,
    seconds: float,
) -> dict[str, Any]:
    """Decode and KV write of one layer. Caches take turns, so that none is still in the GPU's own cache."""
    import torch

    heads, kv_heads, head_dim = shape
    q = torch.randn(batch, heads, head_dim, device=device).to(dtype)
    k = torch.randn(batch, kv_heads, head_dim, device=device).to(dtype)
    tables, num_blocks = _block_tables(batch, length, device)
    one = torch.zeros(2, num_blocks, 16, kv_heads, head_dim, dtype=dtype, device=device)
    caches = [one] + [
        torch.zeros_like(one) for _ in range(COLD // (one.numel() * one.element_size()) if device == "cuda" else 0)
    ]
    lens = torch.full((batch,), length, dtype=torch.int32, device=device)
    slots = tables[:, -1].long() * 16 + (length - 1) % 16
    turn = itertools.cycle(caches)
    read = 2 * batch * length * kv_heads * head_dim * dtype.itemsize + 2 * q.numel() * dtype.itemsize
    written = 4 * k.numel() * dtype.itemsize  # keys and values, each read and written
    decode = time_recorded(lambda: backend.decode(q, next(turn), tables, lens, scale=head_dim**-0.5), device, seconds)
    write = time_recorded(lambda: backend.write_kv(k, k, next(turn), slots), device, seconds / 2)
    return {
        "batch": batch,
        "length": length,
        "decode_us": decode * 1e6,
        "decode_gb_s": read / decode / 1e9,
        "write_us": write * 1e6,
        "write_gb_s": written / write / 1e9,
    }


def _measure_prefill(
    backend: AttentionBackend,
    batch: int,
    length: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: str,
    seconds: float,
) -> dict[str, Any]:
    """Whole prompts. Half of the square of scores is computed: 4 * head_dim operations for each score that counts."""
    import torch

    heads, kv_heads, head_dim = shape
    q = torch.randn(batch * length, heads, head_dim, device=device).to(dtype)
    tables, num_blocks = _block_tables(batch, length, device)
    cache = torch.randn(2, num_blocks, 16, kv_heads, head_dim, device=device).to(dtype)
    lens = torch.full((batch,), length, dtype=torch.int32, device=device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
    took = time_recorded(lambda: backend.prefill(q, cache, starts, tables, lens, scale=head_dim**-0.5), device, seconds)
    operations = batch * heads * 4 * head_dim * length * (length + 1) / 2
    return {"batch": batch, "length": length, "prefill_us": took * 1e6, "tflop_s": operations / took / 1e12}


def _block_tables(batch: int, length: int, device: str) -> tuple[torch.Tensor, int]:
    """Blocks of 16 in no order, and how many there are with the null block."""
    import torch

    per_sequence = -(-length // 16)
    blocks = 1 + torch.randperm(batch * per_sequence, generator=torch.Generator().manual_seed(0))
    return blocks.view(batch, per_sequence).to(device=device, dtype=torch.int32), 1 + len(blocks)


def time_recorded(run: Callable[[], object], device: str, seconds: float) -> float:
    """Median seconds of one call, of ten that were recorded as a CUDA graph: a small kernel is over long before Python has
    asked for the next, and in a model a graph asks. Without a GPU as `time_of`."""
    import torch

    if device != "cuda":
        return time_of(run, device, seconds)
    for _ in range(3):  # compiles
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            run()
    return time_of(graph.replay, device, seconds) / 10


def time_of(run: Callable[[], object], device: str, seconds: float) -> float:
    """Median seconds of one call, of ten at a time between two waits for the GPU: launches overlap with what runs, as they do
    in a model. The first calls, which compile, are not counted."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(3):
        run()
    wait()
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < stop:
        begin = time.perf_counter()
        for _ in range(10):
            run()
        wait()
        times.append((time.perf_counter() - begin) / 10)
    return statistics.median(times)


# ---------------------------------------------------------------------- the engine


def measure_engine(model: str, seconds_left: Callable[[], float], keep: Callable[[str, dict[str, Any]], None]) -> None:
    """Start, steps and throughput of one engine; compiled steps at the end, if there is time for a compiler. Each is given to
    `keep` when it is done."""
    from minivllm import LLM

    engine: list[LLM] = []

    def start() -> dict[str, Any]:
        begin = time.perf_counter()
        engine.append(
            LLM(
                model,
                load_format="dummy",
                device="cuda",
                max_model_len=MAX_MODEL_LEN,
                enable_prefix_caching=False,
                generation_config="vllm",
            )
        )
        took = time.perf_counter() - begin
        return {"start_seconds": took, "engine": _runner(engine[0]).describe(), "line": f"ready in {took:.1f} s"}

    keep("start", _part("start", start))
    if not engine:
        return
    llm = engine[0]
    steps = _part("steps", lambda: measure_steps(_runner(llm), BATCHES))
    keep("steps", steps)
    slowest = max((row["graphed_ms"] for row in steps.get("rows", [])), default=50.0)
    keep("throughput", _part("throughput", lambda: measure_throughput(llm, seconds_left() - COMPILING, slowest / 1e3)))

    def compile_steps() -> dict[str, Any]:
        if seconds_left() < COMPILING:
            return {"line": f"left out: {COMPILING:.0f} s were to be left for the compiler"}
        return measure_compiled(_runner(llm), COMPILED_BATCHES)

    keep("compiled", _part("compiled", compile_steps))
    llm.shutdown()


def _runner(llm: LLM) -> ModelRunner:
    from minivllm.worker.model_runner import ModelRunner

    runner = llm.llm_engine.executor
    assert isinstance(runner, ModelRunner)
    return runner


def measure_steps(runner: ModelRunner, batches: Sequence[int], *, length: int = 512, seconds: float = 0.6) -> dict[str, Any]:
    """Milliseconds of a decode step's forward pass by batch size, all sequences `length` tokens long: operator by operator, and
    as one graph."""
    import torch

    from minivllm.worker.graphs import decode_step

    assert runner.graphs is not None, "the engine was started with graphs"
    graphs, rows = runner.graphs, []
    with torch.inference_mode():
        for batch in batches:
            bucket = graphs.pick_bucket(batch)
            if bucket is None:
                continue
            buffers = graphs.buffers.first(bucket)
            used = fill(buffers, runner, length)
            eager = time_of(partial(decode_step, runner.model, runner.kv_caches, buffers), runner.device_type, seconds)
            graphed = time_of(partial(graphs.replay, bucket), runner.device_type, seconds)
            rows.append({"batch": bucket, "length": used, "eager_ms": eager * 1e3, "graphed_ms": graphed * 1e3})
    graphs.buffers.clear()
    first = rows[0]
    return {
        "rows": rows,
        "line": f"batch {first['batch']}: eager {first['eager_ms']:.2f} ms, graphed {first['graphed_ms']:.2f} ms",
    }


def measure_compiled(runner: ModelRunner, batches: Sequence[int], *, length: int = 512) -> dict[str, Any]:
    """The same through torch.compile, then captured."""
    import torch

    from minivllm.worker.graphs import GraphRunner, compiled, decode_step

    begin = time.perf_counter()
    assert runner.graphs is not None
    step = compiled(partial(decode_step, runner.model, runner.kv_caches))
    graphs = GraphRunner(step, max(batches), runner.batch.max_blocks, runner.device)
    graphs.buckets = sorted(batches)
    graphs.capture()
    took, rows = time.perf_counter() - begin, []
    with torch.inference_mode():
        for batch in graphs.buckets:
            used = fill(graphs.buffers.first(batch), runner, length)
            milliseconds = 1e3 * time_of(partial(graphs.replay, batch), runner.device_type, 0.6)
            rows.append({"batch": batch, "length": used, "compiled_graphed_ms": milliseconds})
    return {
        "compile_seconds": took,
        "rows": rows,
        "line": f"batch {rows[0]['batch']}: compiled and graphed {rows[0]['compiled_graphed_ms']:.2f} ms",
    }


def fill(buffers: DecodeBuffers, runner: ModelRunner, length: int) -> int:
    """Make every row a sequence of `length` tokens with its own blocks, or as many as the pool has for each; returns that."""
    import torch

    block_size, num_rows = runner.config.block_size, len(buffers.seq_lens)
    num_blocks = min(-(-length // block_size), (runner.num_blocks - 1) // num_rows, buffers.block_tables.shape[1])
    length = min(length, num_blocks * block_size)
    if length < 1:
        raise ValueError(f"The KV pool of {runner.num_blocks} blocks is too small for {num_rows} sequences.")
    blocks = 1 + torch.arange(num_rows * num_blocks, device=buffers.block_tables.device)
    tables = blocks.view(num_rows, num_blocks)
    buffers.input_ids.copy_(torch.arange(num_rows))
    buffers.positions.fill_(length - 1)
    buffers.seq_lens.fill_(length)
    buffers.block_tables[:, :num_blocks].copy_(tables)
    buffers.slot_mapping.copy_(tables[:, (length - 1) // block_size] * block_size + (length - 1) % block_size)
    return length


def nano_vllm_workload(num_requests: int = 256) -> list[BenchRequest]:
    """Lengths as nano-vllm's bench.py draws them; which tokens makes no difference to random weights."""
    return uniform(num_requests, vocab_size=10000, prompt_len=(100, 1024), output_len=(100, 1024))


def measure_throughput(llm: LLM, seconds_left: float, slowest_step: float, num_requests: int = 256) -> dict[str, Any]:
    """Output tokens a second on nano-vllm's workload, or on its first requests where all of them would take too long."""
    from minivllm import SamplingParams

    work = nano_vllm_workload(num_requests)
    # a step yields a token for each running request; beside the forward pass there are prefills, sampling and the host
    expected = 3 * slowest_step * sum(request.output_len for request in work) / llm.config.max_num_seqs
    used = work[: max(1, int(len(work) * min(1.0, seconds_left / max(expected, 1e-9))))]
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=request.output_len) for request in used]
    llm.generate([used[0].prompt_token_ids], params[:1], use_tqdm=False)
    begin = time.perf_counter()
    outputs = llm.generate([request.prompt_token_ids for request in used], params, use_tqdm=False)
    took = time.perf_counter() - begin
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    wanted = sum(request.output_len for request in used)
    if num_output != wanted:
        raise ValueError(f"The engine gave {num_output} output tokens where {wanted} were asked for.")
    return {
        "requests": len(used),
        "of": len(work),
        "prompt_tokens": sum(len(request.prompt_token_ids) for request in used),
        "output_tokens": num_output,
        "generate_seconds": took,
        "output_tok_s": num_output / took,
        "line": f"{num_output / took:.0f} output tok/s, {len(used)} requests",
    }


PARTS_APART = {"kernels": measure_kernels}


if __name__ == "__main__":
    raise SystemExit(main())
