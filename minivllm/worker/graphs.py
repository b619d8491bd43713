"""CUDA graphs for decode steps. Lab 09 builds `pick_bucket`, `fill`, `capture` and `replay`. May not know requests, or what the
model computes.

A decode step of a small model is some 300 kernels of a few microseconds each, and Python takes longer to launch one than the
GPU to run it. A graph is the recording of all of them, launched at once. It repeats what was recorded *on the memory that was
recorded*: so a step's inputs are copied into buffers that never move, and batches are rounded up to a few sizes ("buckets"),
with padding rows that may do no harm.

    step of 3 requests -> bucket 4    row    input_ids   positions   slot_mapping   seq_lens   block_tables
                                       0        812         40           88            41        5 2 9 . .
                                       1         17          3          115             4        7 . . . .
                                       2        400         19           35            20        1 2 . . .
                          padding      3          0          0            0             1        0 0 0 0 0

A padding row is one token of a sequence that lives in the null block: it writes to slot 0, which is nobody's, and reads what it
wrote. Steps with prefills, whose shapes are never the same twice, run without graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from minivllm.attention.interface import AttentionMetadata
from minivllm.worker.input_batch import StepInputs
from minivllm.worker.operator_graph import OperatorGraph
from minivllm.worker.transfer import to_device

LARGEST_BUCKET = 512  # beyond, kernels take longer than their launches
MOST_RECORDED_ROWS = 16  # by `OperatorGraph`s, which keep every result of every bucket: a few are enough to try


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then in steps of 8 to 256 and of 16 from there, and max_num_seqs itself: at most 7 rows in 8 are real, or 15 in
    16, and a lone request pays for nobody."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, LARGEST_BUCKET + 1, 16)]
    return sorted({size for size in sizes if size <= max_num_seqs} | {min(max_num_seqs, LARGEST_BUCKET)})


@dataclass(slots=True)
class DecodeBuffers:
    """The inputs of a decode step of N rows, in memory that stays where it is. See `attention/interface.py` for each."""

    input_ids: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64
    slot_mapping: torch.Tensor  # [N] int64
    seq_lens: torch.Tensor  # [N] int32
    block_tables: torch.Tensor  # [N, max_blocks] int32
    query_start_loc: torch.Tensor  # [N + 1] int32: 0, 1, 2, ... for rows of one token

    @classmethod
    def allocate(cls, num_rows: int, max_blocks: int, device: torch.device | str) -> DecodeBuffers:
        """All rows are padding."""
        buffers = cls(
            input_ids=torch.empty(num_rows, dtype=torch.int64, device=device),
            positions=torch.empty(num_rows, dtype=torch.int64, device=device),
            slot_mapping=torch.empty(num_rows, dtype=torch.int64, device=device),
            seq_lens=torch.empty(num_rows, dtype=torch.int32, device=device),
            block_tables=torch.empty(num_rows, max_blocks, dtype=torch.int32, device=device),
            query_start_loc=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
        )
        buffers.clear()
        return buffers

    def clear(self) -> None:
        """Make every row padding: one token of a sequence that lives in the null block."""
        for tensor in (self.input_ids, self.positions, self.slot_mapping, self.block_tables):
            tensor.zero_()
        self.seq_lens.fill_(1)

    def first(self, n: int) -> DecodeBuffers:
        """The first n rows: the same memory."""
        return DecodeBuffers(
            self.input_ids[:n],
            self.positions[:n],
            self.slot_mapping[:n],
            self.seq_lens[:n],
            self.block_tables[:n],
            self.query_start_loc[: n + 1],
        )

    def tensors(self) -> list[torch.Tensor]:
        return [
            self.input_ids,
            self.positions,
            self.slot_mapping,
            self.seq_lens,
            self.block_tables,
            self.query_start_loc,
        ]


# decode_step(buffers of N rows) -> hidden states [N, hidden_size]
DecodeStep = Callable[[DecodeBuffers], torch.Tensor]


def decode_step(model: Callable[..., Any], kv_caches: Sequence[torch.Tensor], buffers: DecodeBuffers) -> torch.Tensor:
    """The region that is captured: a decode step of `buffers`' rows -> hidden states [rows, hidden_size]. Nothing in it may ask
    the device for a number, make a tensor from the host's, or have a shape that depends on data: `graph_safety.py` checks it
    where there is no GPU."""
    num_rows = len(buffers.seq_lens)
    meta = AttentionMetadata(
        num_decodes=num_rows,
        num_tokens=num_rows,
        query_start_loc=buffers.query_start_loc,
        seq_lens=buffers.seq_lens,
        block_tables=buffers.block_tables,
        slot_mapping=buffers.slot_mapping,
    )
    hidden: torch.Tensor = model(buffers.input_ids, buffers.positions, kv_caches, meta)
    return hidden


def compiled(step: DecodeStep) -> DecodeStep:
    """The step through torch.compile, which fuses the small operators between matrix products: three compilations, of some ten
    seconds each, when graphs are recorded (the largest bucket, any other size, and size 1)."""
    flat = torch.compile(lambda *tensors: step(DecodeBuffers(*tensors)), fullgraph=True)
    return lambda buffers: flat(*buffers.tensors())


class Graph(Protocol):
    """A recording: what runs inside `capture()` is run again by `replay()`, on the same memory."""

    def capture(self) -> Any: ...

    def replay(self) -> None: ...


class CudaGraph:
    """torch's CUDA graph. Graphs that share a `pool` share the memory of their intermediate results, for they run in turns."""

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    @contextmanager
    def capture(self) -> Iterator[None]:
        # another thread of this process (a notebook's, a progress bar's) may use the GPU meanwhile
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            yield

    def replay(self) -> None:
        self._graph.replay()


class GraphRunner:
    """Graphs of `decode_step` for every bucket up to max_num_seqs rows: CUDA graphs on a GPU, elsewhere `OperatorGraph`s, which
    repeat the operators one by one and serve to show, and to test, that a recording gives what the step gives.

    decode_step: called with the first rows of `buffers`.   max_blocks: of the longest block table.
    """

    def __init__(self, decode_step: DecodeStep, max_num_seqs: int, max_blocks: int, device: torch.device) -> None:
        self.decode_step = decode_step
        self.device = device
        self.buckets = bucket_sizes(max_num_seqs)
        self.buffers = DecodeBuffers.allocate(self.buckets[-1], max_blocks, device)
        self.graphs: dict[int, tuple[Graph, torch.Tensor]] = {}  # by bucket, with the memory its hidden states appear in
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def new_graph(self) -> Graph:
        """Nothing recorded yet."""
        return CudaGraph(self._pool) if self.device.type == "cuda" else OperatorGraph()

    def run(self, inputs: StepInputs) -> torch.Tensor | None:
        """Hidden states [num rows, hidden_size] of a step, to be used before the next one; None if no graph serves it."""
        num_rows = len(inputs.seq_lens)
        bucket = self.pick_bucket(num_rows)
        if inputs.num_decodes < num_rows or bucket is None or bucket not in self.graphs:
            return None
        self.fill(inputs, bucket)
        return self.replay(bucket)[:num_rows]

    def pick_bucket(self, n: int) -> int | None:
        """The smallest bucket that holds n rows; None if n is more than all of them."""
        i = bisect_left(self.buckets, n)
        return self.buckets[i] if i < len(self.buckets) else None

    def fill(self, inputs: StepInputs, bucket: int) -> None:
        """Put a step of at most `bucket` decodes into the first rows of the buffers, and padding into the rest of them.

        Columns of block_tables beyond the step's widest keep what they had: no row's seq_len reaches them.
        """
        arrays = (inputs.input_ids, inputs.positions, inputs.slot_mapping, inputs.seq_lens, inputs.block_tables)
        padding = (0, 0, 0, 1, 0)
        rows = [padded(array, bucket, value) for array, value in zip(arrays, padding, strict=True)]
        targets = self.buffers.first(bucket).tensors()[: len(rows)]
        targets[-1] = targets[-1][:, : inputs.block_tables.shape[1]]
        for target, source in zip(targets, to_device(rows, self.device), strict=True):
            target.copy_(source)

    @torch.inference_mode()
    def capture(self) -> None:
        """Record every bucket, the largest first: the smaller ones then fit into its memory. Only padding is computed, so all
        that is written to the KV cache goes to the null block."""
        self.buffers.clear()
        for bucket in reversed(self.buckets):
            buffers = self.buffers.first(bucket)
            self.decode_step(buffers)  # compiles kernels and allocates workspaces, which must not happen in a recording
            graph = self.new_graph()
            with graph.capture():
                hidden = self.decode_step(buffers)
            self.graphs[bucket] = graph, hidden

    def replay(self, bucket: int) -> torch.Tensor:
        """Run the bucket's graph over what the buffers hold; returns hidden states [bucket, hidden_size], whose memory the next
        replay writes to."""
        graph, hidden = self.graphs[bucket]
        graph.replay()
        return hidden


def padded(array: np.ndarray, num_rows: int, value: int) -> np.ndarray:
    """The rows of array [n, ...], and then rows of `value`: [num_rows, ...]."""
    out = np.full((num_rows, *array.shape[1:]), value, dtype=array.dtype)
    out[: len(array)] = array
    return out
