"""minivllm bench perplexity: how well a model predicts a text, in the form the engine runs it: what int4 weights cost."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

WINDOW = 512  # tokens; the first of each window has nothing before it and does not count


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="minivllm bench perplexity", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--quantization", nargs="+", default=["none", "int4"], choices=("none", "int4"))
    parser.add_argument("--text", metavar="FILE", help="default: what this package's files say of themselves")
    parser.add_argument("--num-windows", type=int, default=16, help=f"of {WINDOW} tokens")
    args = parser.parse_args(argv)
    if args.num_windows < 1:
        parser.error("--num-windows must be at least 1")
    text = Path(args.text).read_text(encoding="utf-8") if args.text else own_text()

    for quantization in args.quantization:
        value, count = perplexity(
            args.model, args.dtype, None if quantization == "none" else quantization, text, args.num_windows
        )
        print(f"{args.model}, quantization {quantization}: perplexity {value:.3f} over {count} tokens")
    return 0


def perplexity(model: str, dtype: str, quantization: str | None, text: str, num_windows: int) -> tuple[float, int]:
    """exp of the mean negative log-probability, and of how many tokens. ValueError for a text shorter than a window."""
    from minivllm import LLM, SamplingParams

    with LLM(model=model, dtype=dtype, quantization=quantization, enable_prefix_caching=False, max_model_len=WINDOW + 1) as llm:
        ids = llm.get_tokenizer().encode(text)
        windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)][:num_windows]
        if not windows:
            raise ValueError(f"The text has {len(ids)} tokens; it must have {WINDOW} at least.")
        outputs = llm.generate(windows, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    total, count = 0.0, 0
    for window, output in zip(windows, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token_id, entry in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            total -= entry[token_id].logprob
            count += 1
    return math.exp(total / count), count


def own_text() -> str:
    """The docstrings at the head of this package's files: English that no model was trained on."""
    import ast

    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return "\n\n".join(ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "" for file in files)


if __name__ == "__main__":
    raise SystemExit(main())
