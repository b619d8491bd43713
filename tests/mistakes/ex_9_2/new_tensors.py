# expect: A graph reads the memory it was recorded on
from bisect import bisect_left

import torch

from minivllm.worker.graphs import DecodeBuffers, bucket_sizes, padded


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
        self.buffers.input_ids = torch.from_numpy(padded(inputs.input_ids, bucket, 0))
        self.buffers.positions = torch.from_numpy(padded(inputs.positions, bucket, 0))
        self.buffers.slot_mapping = torch.from_numpy(padded(inputs.slot_mapping, bucket, 0))
        self.buffers.seq_lens = torch.from_numpy(padded(inputs.seq_lens, bucket, 1))
        self.buffers.block_tables = torch.from_numpy(padded(inputs.block_tables, bucket, 0))
