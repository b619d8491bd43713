# expect: passed
import numpy as np
import torch

from minivllm.worker.graphs import DecodeBuffers, bucket_sizes


class GraphRunner:
    def __init__(self, decode_step, max_num_seqs, max_blocks, device):
        self.decode_step = decode_step
        self.device = device
        self.buckets = bucket_sizes(max_num_seqs)
        self.buffers = DecodeBuffers.allocate(self.buckets[-1], max_blocks, device)

    def pick_bucket(self, n):
        return min((size for size in self.buckets if size >= n), default=None)

    def fill(self, inputs, bucket):
        b, n = self.buffers, len(inputs.seq_lens)
        b.clear()
        b.input_ids[:n].copy_(torch.from_numpy(inputs.input_ids))
        b.positions[:n].copy_(torch.from_numpy(inputs.positions))
        b.slot_mapping[:n].copy_(torch.from_numpy(inputs.slot_mapping))
        b.seq_lens[:n].copy_(torch.from_numpy(inputs.seq_lens))
        wide = np.zeros((n, b.block_tables.shape[1]), dtype=np.int32)
        wide[:, : inputs.block_tables.shape[1]] = inputs.block_tables
        b.block_tables[:n].copy_(torch.from_numpy(wide))
