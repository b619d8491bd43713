# expect: Row 1 is padding (the step has 1 row, the bucket 2)|is padding
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
        names = ("input_ids", "positions", "slot_mapping", "seq_lens", "block_tables")
        n = len(inputs.seq_lens)
        for name in names:
            source = torch.from_numpy(getattr(inputs, name))
            target = getattr(self.buffers, name)
            if name == "block_tables":
                target = target[:, : source.shape[1]]
            target[:n] = source
            target[n:bucket] = source[-1]
