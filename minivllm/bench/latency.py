"""minivllm bench latency: one decode step, part by part, for several batch sizes. One engine, this process."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from minivllm.bench.report import device_info, device_line, write_json

PARTS = ("schedule", "prepare", "layers", "attention", "lm_head", "sampler", "other")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="minivllm bench latency", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--quantization", choices=("int4",))
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output-len", type=int, default=64, help="decode steps")
    parser.add_argument("--json", metavar="FILE", help="write the table and the device")
    args = parser.parse_args(argv)
    if min(*args.batch_sizes, args.input_len, args.output_len - 2) < 1:
        parser.error("--batch-sizes and --input-len must be at least 1, --output-len at least 3")

    from minivllm import LLM

    llm = LLM(
        model=args.model,
        dtype=args.dtype,
        quantization=args.quantization,
        enforce_eager=args.enforce_eager,
        device="cpu",
        max_num_seqs=max(args.batch_sizes),
        enable_prefix_caching=False,
        generation_config="vllm",
        trace=True,
    )
    table = {n: decode_step(llm, n, args.input_len, args.output_len) for n in args.batch_sizes}
    device = device_info()
    print(f"{llm.llm_engine.executor.describe()}\n{device_line(device)}\n")
    print(render(table))
    if args.json:
        result = {"benchmark": "latency", "model": args.model, "dtype": llm.dtype, "device": device, "milliseconds": table}
        write_json(args.json, result)
        print(f"Written to {args.json}")
    return 0


def decode_step(llm: Any, batch_size: int, input_len: int, output_len: int) -> dict[str, float]:
    """Medians over the decode steps of `batch_size` equal requests, in milliseconds. "attention" is measured beside the steps,
    on the last one's arguments, and taken out of "layers"."""
    from minivllm import SamplingParams

    runner, watch = llm.llm_engine.executor, Stopwatch()
    prompts = [[(17 * i + j) % runner.vocab_size for j in range(input_len)] for i in range(batch_size)]
    model, sampler = runner.model, runner.sampler
    runner.model, runner.sampler = _TimedModel(model, watch), watch.timed("sampler", sampler)
    try:
        llm.trace.clear()
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True), use_tqdm=False)
        attention = attention_seconds(runner, *runner.model.last_step)
    finally:
        runner.model, runner.sampler = model, sampler
    steps = llm.trace.steps
    rows = []
    for i in range(3 - output_len, 0):  # from the end: a step that only computes part of a prompt samples nothing
        step = steps[i]
        if not len(step.tokens) == batch_size == step.num_tokens:
            continue
        layers, head, sampling = (watch.seconds[part][i] for part in ("layers", "lm_head", "sampler"))
        prepare = step.execute_s - layers
        other = step.sample_s - head - sampling + step.update_s
        rows.append((step.schedule_s, prepare, layers - attention, attention, head, sampling, other, step.duration))
    columns = [1e3 * statistics.median(column) for column in zip(*rows, strict=True)]
    return dict(zip((*PARTS, "step"), columns, strict=True))


def attention_seconds(runner: Any, query_len: int, meta: Any) -> float:
    """Of all layers of a decode step, on the step's own cache and shape: the operator that a compiled decoder calls, or the
    backend's `paged_attention`."""
    import torch

    from minivllm.attention.cpu import NO_WINDOW
    from minivllm.attention.interface import paged_attention
    from minivllm.models.compiled import CompiledDecoder

    config, backend = runner.model_config, runner.model.attention_backend
    is_compiled, scale = isinstance(runner.model.decoder, CompiledDecoder), config.head_dim**-0.5
    shape = (meta.query_start_loc, meta.seq_lens, meta.block_tables, meta.slot_mapping)
    q = torch.randn(query_len, config.num_heads, config.head_dim).to(runner.dtype)
    k, v = (torch.zeros(query_len, config.num_kv_heads, config.head_dim, dtype=runner.dtype) for _ in range(2))
    seconds = []
    with torch.inference_mode():
        for _ in range(9):
            start = time.perf_counter()
            for cache in runner.kv_caches:
                if is_compiled:
                    torch.ops.minivllm.cpu_attention(q, k, v, cache, *shape, scale, NO_WINDOW)
                else:
                    paged_attention(backend, q, k, v, cache, meta, scale=scale)
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


class Stopwatch:
    """Seconds of each call, by part; one entry a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def timed(self, part: str, call: Callable[..., Any]) -> Any:
        """The same callable, timed. It keeps its class: the engine asks a sampler for its own."""
        watch = self

        class Timed(type(call)):  # type: ignore[misc]
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return watch.measure(part, call, *args, **kwargs)

        return Timed()

    def measure(self, part: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = call(*args, **kwargs)
        self.seconds.setdefault(part, []).append(time.perf_counter() - start)
        return result


class _TimedModel:
    """A decoder whose two calls are timed, and which remembers the shape of the last decode step of the most requests."""

    def __init__(self, model: Any, watch: Stopwatch) -> None:
        self.decoder, self._watch = model, watch
        self.last_step: tuple[int, Any] = (0, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def __call__(self, input_ids: Any, positions: Any, kv_caches: Any, meta: Any) -> Any:
        if meta.num_decodes == meta.num_tokens >= self.last_step[0]:
            self.last_step = meta.num_tokens, meta
        return self._watch.measure("layers", self.decoder, input_ids, positions, kv_caches, meta)

    def logits(self, hidden: Any) -> Any:
        return self._watch.measure("lm_head", self.decoder.logits, hidden)


def render(table: dict[int, dict[str, float]]) -> str:
    """As a Markdown table: a row a part, a column a batch size."""
    sizes = list(table)
    lines = ["| ms | " + " | ".join(f"n={n}" for n in sizes) + " |", "|---|" + "---:|" * len(sizes)]
    for part in (*PARTS, "step"):
        lines.append(f"| {part} | " + " | ".join(f"{table[n][part]:.2f}" for n in sizes) + " |")
    speeds = " | ".join(f"{1e3 * n / table[n]['step']:.0f}" for n in sizes)
    return "\n".join([*lines, f"| output tok/s | {speeds} |"])


if __name__ == "__main__":
    raise SystemExit(main())
