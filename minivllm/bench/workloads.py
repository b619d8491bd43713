"""Seeded workloads, the same on every machine. Pure Python.

`uniform(n)` is the W(n) of the README's tables: n prompts of 32-256 random tokens, each followed by 32-128 output tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

# Ids below this are special tokens in the models we use (SmolLM2 has 17 of them), so random prompts keep clear.
FIRST_PLAIN_TOKEN = 100

DEMO_PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about a very fast turtle.",
    "Give me three tips for learning a new programming language.",
    "What is the difference between a process and a thread?",
    "Tell a short story that begins with: The lighthouse went dark.",
    "List five fruits and one thing to cook with each.",
    "How does a refrigerator keep food cold?",
    "Write a polite email asking a colleague to review my code.",
)


@dataclass(frozen=True)
class BenchRequest:
    """One request of a workload: prompt token ids, and how many output tokens to generate (end tokens ignored)."""

    prompt_token_ids: list[int]
    output_len: int


def uniform(
    num_prompts: int,
    *,
    vocab_size: int,
    seed: int = 0,
    prompt_len: tuple[int, int] = (32, 256),
    output_len: tuple[int, int] = (32, 128),
) -> list[BenchRequest]:
    """W(n): lengths drawn uniformly from closed ranges, then random tokens. The lengths depend on the seed and n alone, so
    models of different vocabularies get the same amount of work."""
    if num_prompts < 1:
        raise ValueError(f"num_prompts must be at least 1, got {num_prompts}.")
    rng = random.Random(seed)
    sizes = [(rng.randint(*prompt_len), rng.randint(*output_len)) for _ in range(num_prompts)]
    return [BenchRequest([rng.randrange(FIRST_PLAIN_TOKEN, vocab_size) for _ in range(p)], o) for p, o in sizes]
