# expect: as in the step's inputs. That is what an earlier step left there
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
        n, m = inputs.block_tables.shape
        first = self.buffers.first(bucket)
        first.clear()
        for name in ("input_ids", "positions", "seq_lens"):
            getattr(first, name)[:n] = torch.from_numpy(getattr(inputs, name))
        first.slot_mapping.fill_(9)
        first.block_tables[:n, :m] = torch.from_numpy(inputs.block_tables)
