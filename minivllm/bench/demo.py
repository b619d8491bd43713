"""The main job in one minute: generate for a handful of prompts with live progress, then the same prompts in transformers.

make demo
"""

from __future__ import annotations

import logging
import sys

from minivllm.bench.compare import run_engine
from minivllm.bench.report import device_info, device_line
from minivllm.bench.workloads import DEMO_PROMPTS

MAX_TOKENS = 64


def main() -> int:
    from rich.console import Console
    from rich.markup import escape

    from minivllm import LLM, SamplingParams

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    console = Console(highlight=False)
    console.print(f"[bold]minivllm[/bold] on {device_line(device_info())}\n")
    llm = LLM(model="smollm2-135m")
    chats = [[{"role": "user", "content": text}] for text in DEMO_PROMPTS]
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
    for text, output in zip(DEMO_PROMPTS, outputs, strict=True):
        done = output.outputs[0]
        more = " [dim]...[/dim]" if done.finish_reason == "length" else ""
        console.print(f"[bold cyan]{escape(text)}[/bold cyan]\n{escape(done.text.strip())}{more}\n")
    model, dtype = llm.model_path, llm.dtype
    llm.shutdown()

    console.print("The same prompts, each engine in a fresh process (greedy, the same weights and dtype):")
    spec = {
        "model": str(model),
        "dtype": dtype,
        "prompts": [o.prompt_token_ids for o in outputs],
        "output_lens": [MAX_TOKENS] * len(outputs),
        "ignore_eos": False,
    }
    rates = {}
    for engine in ("minivllm", "transformers"):
        result = run_engine(engine, {**spec, "progress": True})
        rates[engine] = result["output_tokens"] / result["seconds"]
        console.print(
            f"  {engine + ' ' + result['version']:22} {rates[engine]:7.1f} output tok/s"
            f"  ({result['output_tokens']} tokens in {result['seconds']:.2f} s)"
        )
    console.print(f"  minivllm is [bold]{rates['minivllm'] / rates['transformers']:.1f}x[/bold] transformers here.")
    console.print("\nNext: [bold]make lab[/bold], then open 02_naive_generation.ipynb.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
