"""A load test that checks every token:  python -m tests.serving.soak --seconds 300

So many clients at once, each with one stream after another, over the echo model, whose answer to any prompt a client can
compute. Some leave in the middle, some send long prompts, some bad requests, some read slowly. At the end every block must be
free, and the memory of both processes what it was after the first third.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import psutil

from minivllm.bench.http_stream import HttpError, post_events
from minivllm.serving.echo_model import expected_token_ids
from tests.serving.harness import ECHO, Server, serving

MAX_TOKENS = 128
ALLOWED_GROWTH = 1.10  # of the memory, over the last two thirds

BAD_REQUESTS: tuple[dict[str, Any], ...] = (
    {"prompt": ""},
    {"prompt": [10**6]},
    {"prompt": [5] * 5000},
    {"prompt": "x", "temperature": -1},
    {"prompt": "x", "tools": [1]},
    {"prompt": "x", "logit_bias": {"999999": 1}},
    {"prompt": {"no": "prompt"}},
)


@dataclass
class Findings:
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory: dict[str, list[int]] = field(default_factory=lambda: {"front end": [], "core": []})

    def growth(self, name: str) -> float:
        """Of the median memory, from the second third to the last."""
        samples = self.memory[name]
        third = max(1, len(samples) // 3)
        return statistics.median(samples[-third:]) / statistics.median(samples[third : 2 * third] or samples)


async def client(url: str, seed: int, until: float, found: Findings) -> None:
    """One stream after another."""
    rng = random.Random(seed)
    number = 0
    while time.monotonic() < until and len(found.faults) < 10:
        number += 1
        name = f"client {seed} stream {number} "
        if rng.random() < 0.05:
            await send_a_bad_request(url, rng, found)
            continue
        prompt = name + "x" * (rng.randrange(500, 1500) if rng.random() < 0.05 else rng.randrange(100))
        leaves_after = rng.randrange(1, MAX_TOKENS) if rng.random() < 0.2 else None
        is_slow = rng.random() < 0.03
        await stream(url, prompt, leaves_after, is_slow, found)


async def stream(url: str, prompt: str, leaves_after: int | None, is_slow: bool, found: Findings) -> None:
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True, "return_token_ids": True}
    token_ids: list[int] = []
    text = ""
    try:
        async with contextlib.aclosing(post_events(f"{url}/v1/completions", body)) as events:
            async for event in events:
                token_ids += event["choices"][0]["token_ids"]
                text += event["choices"][0]["text"]
                if is_slow:
                    await asyncio.sleep(0.05)
                if leaves_after is not None and len(token_ids) >= leaves_after:
                    break
    except (HttpError, OSError, KeyError) as error:
        found.faults.append(f"{prompt[:30]!r}: {type(error).__name__}: {error}")
        return
    expected = expected_token_ids(ECHO.encode(prompt), MAX_TOKENS)
    if leaves_after is None and token_ids != expected:
        found.faults.append(f"{prompt[:30]!r}: {len(token_ids)} tokens, not the expected ones")
    elif token_ids != expected[: len(token_ids)] or text != ECHO.decode(token_ids):
        found.faults.append(f"{prompt[:30]!r}: crossed tokens, or a text that is not theirs")
    found.counts["left" if leaves_after else "slow" if is_slow else "complete"] += 1
    found.counts["tokens"] += len(token_ids)


async def send_a_bad_request(url: str, rng: random.Random, found: Findings) -> None:
    try:
        async for _ in post_events(f"{url}/v1/completions", {**rng.choice(BAD_REQUESTS), "stream": True}):
            found.faults.append("a bad request was answered")
    except HttpError as error:
        if error.status != 400:
            found.faults.append(f"a bad request got {error}")
    found.counts["refused"] += 1


async def watch_memory(server: Server, until: float, found: Findings) -> None:
    processes = {"front end": psutil.Process(server.process.pid), "core": psutil.Process(server.core_pid)}
    pause = max(0.2, (until - time.monotonic()) / 300)
    while time.monotonic() < until:
        for name, process in processes.items():
            found.memory[name].append(process.memory_info().rss)
        await asyncio.sleep(pause)


async def soak(server: Server, num_streams: int, seconds: float, seed: int = 0) -> Findings:
    found = Findings()
    until = time.monotonic() + seconds
    clients = [client(server.url, seed + i, until, found) for i in range(num_streams)]
    await asyncio.gather(watch_memory(server, until, found), *clients)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with serving("echo:5", "--max-num-seqs", "48", "--num-gpu-blocks-override", "700") as server:
        found = asyncio.run(soak(server, args.streams, args.seconds, args.seed))
        server.wait_until_idle()
        print(dict(found.counts), f"{found.counts['tokens'] / args.seconds:.0f} tokens/s")
        for name, samples in found.memory.items():
            print(f"{name}: {samples[0] >> 20} MiB at first, {samples[-1] >> 20} at last, grown {found.growth(name) - 1:+.1%}")
        print("blocks all free; preemptions:", int(sum(map(float, _preemptions(server)))))
    print(*found.faults, sep="\n")
    return 1 if found.faults or any(found.growth(name) > ALLOWED_GROWTH for name in found.memory) else 0


def _preemptions(server: Server) -> list[str]:
    lines = server.get("/metrics").text.splitlines()
    return [line.rpartition(" ")[2] for line in lines if line.startswith("vllm:num_preemptions_total")]


if __name__ == "__main__":
    sys.exit(main())
