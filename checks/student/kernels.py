"""Lab 08's helpers: the student's Triton kernels as a module, and what they do in a process of their own in which Triton
interprets (it decides that once, when it is imported).

    kernels = my_kernels()                              my_engine's file, or minivllm's where nothing has passed
    interpreted("touched", block_tables=..., ...)       one of JOBS, in another Python with TRITON_INTERPRET=1
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from checks.student.engine import REFERENCE, build, components
from checks.student.failure import CheckFailed
from checks.student.home import ROOT, engine_dir, home, locked
from minivllm.components import SEAMS, load_file


def my_kernels() -> ModuleType:
    """triton_kernels.py with the student's functions in it, as a module of its own each time: an experiment may change it.
    Raises CheckFailed where there is no Triton."""
    from minivllm.attention.triton_utils import HAS_TRITON, why_no_triton

    if not HAS_TRITON:
        raise CheckFailed(f"This cell {why_no_triton()} The other cells work without it.")
    with locked():
        build()
    file = str(SEAMS["attention.decode"].triton_file)
    root = engine_dir() if (engine_dir() / file).is_file() else REFERENCE
    return load_file(root / file, root)


def interpreted(job: str, **arguments: Any) -> Any:
    """What JOBS[job](**arguments) returns in a process that interprets. Plain data in, plain data out."""
    my_kernels()  # refuse where there is none; and my_engine is built
    environment = {**os.environ, "TRITON_INTERPRET": "1", "MINIVLLM_HOME": str(home()), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "checks.student.kernels", job],
        input=json.dumps(arguments), capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    if done.returncode:
        raise CheckFailed(f"The interpreter's process failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def answer(model: str, prompts: list[str], max_tokens: int) -> dict[str, Any]:
    """Greedy answers of an engine with the student's parts, in float32 so that rounding does not decide; the seconds of all."""
    from minivllm import LLM, SamplingParams

    mine = components()
    settings = {"dtype": "float32", "max_model_len": 128, "num_gpu_blocks_override": 33}
    with LLM(model, components=mine, **settings) as llm:  # type: ignore[arg-type]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)  # compiles, and fills caches
        begin = time.perf_counter()
        replies = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)
        seconds = time.perf_counter() - begin
    part = mine.pick("attention.decode")
    return {
        "part": f"{part.__module__}.{part.__qualname__}".removeprefix("minivllm_components."),
        "texts": [reply.outputs[0].text for reply in replies],
        "token_ids": [list(reply.outputs[0].token_ids) for reply in replies],
        "seconds": seconds,
    }


def touched(
    block_tables: list[list[int]],
    seq_lens: list[int],
    *,
    block_size: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    tile: int,
    map_of: bool = True,
) -> dict[str, Any]:
    """One decode by the student's kernel, watched. reads (with map_of): [sequence, kv head, 0 for keys or 1 for values, slot,
    tile number]; programs: how many ran; bytes: of all loads and stores; most_reads: how often the number read most was read;
    cache_bytes: of the keys and values of these sequences; read_bytes: of what was read of the cache, each number once."""
    import numpy as np
    import torch

    from minivllm.attention.triton_trace import recording

    kernels = my_kernels()
    num_blocks = 1 + max(block for table in block_tables for block in table)
    tables = torch.zeros(len(seq_lens), max(map(len, block_tables)), dtype=torch.int32)
    for row, table in zip(tables, block_tables, strict=True):
        row[: len(table)] = torch.tensor(table)
    cache = torch.randn(2, num_blocks, block_size, kv_heads, head_dim).to(torch.float16)
    q = torch.randn(len(seq_lens), kv_heads * group, head_dim).to(torch.float16)
    vars(kernels)["choose_tiles"] = lambda *_: kernels.Tiles(kernels.MIN_ROWS, tile, 4, 1)
    with recording() as accesses:
        kernels.paged_decode(q, cache, tables, torch.tensor(seq_lens, dtype=torch.int32), num_parts=1)

    counts, token = np.zeros(cache.numel(), dtype=np.int64), kv_heads * head_dim
    reads: list[list[int]] = []
    tiles: dict[tuple[tuple[int, int, int], int], int] = {}  # of each program, its keys' and its values'
    for access in accesses:
        offsets = access.offsets_in(cache)
        if access.is_store or not len(offsets):
            continue
        np.add.at(counts, offsets, 1)
        part = int(offsets[0]) * 2 // cache.numel()
        number = tiles[access.program, part] = tiles.get((access.program, part), -1) + 1
        if map_of:
            slots = sorted({int(o) // token % (num_blocks * block_size) for o in offsets})
            reads += [[access.program[0], access.program[1], part, slot, number] for slot in slots]
    return {
        "reads": reads,
        "programs": len({access.program for access in accesses}),
        "bytes": int(sum(len(access.addresses) * access.itemsize for access in accesses)),
        "most_reads": int(counts.max()),
        "cache_bytes": int(2 * sum(seq_lens) * token * cache.element_size()),
        "read_bytes": int((counts > 0).sum() * cache.element_size()),
    }


JOBS: dict[str, Callable[..., dict[str, Any]]] = {"answer": answer, "touched": touched}


if __name__ == "__main__":
    print("\n" + json.dumps(JOBS[sys.argv[1]](**json.load(sys.stdin))))
