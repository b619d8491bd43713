# expect: an earlier, larger step left there
from bisect import bisect_left

import torch

from minivllm.worker.graphs import DecodeBuffers, bucket_sizes


class GraphRunner:
    def __init__(self, decode_step, max_num_seqs, max_blocks, device):
        self.decode_step = decode_step
        self.device = device
        self.buckets = bucket_sizes(max_num_seqs)
        self.buffers = DecodeBuffers.allocate(self.buckets[-1], max_blocks, device)

    def pick_bucket(self, n):
        i = bisect_left(self.buckets, n)
        return self.buckets[i] if i < len(self.buckets) else None

    def fill(self, inputs, bucket):
        for name in ("input_ids", "positions", "slot_mapping", "seq_lens"):
            source = torch.from_numpy(getattr(inputs, name))
            getattr(self.buffers, name)[: len(source)] = source
        tables = torch.from_numpy(inputs.block_tables)
        self.buffers.block_tables[: len(tables), : tables.shape[1]] = tables
