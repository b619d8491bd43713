# expect: passed
import torch

from minivllm.worker.graphs import DecodeBuffers, bucket_sizes


class GraphRunner:
    def __init__(self, decode_step, max_num_seqs, max_blocks, device):
        self.decode_step = decode_step
        self.device = device
        self.buckets = bucket_sizes(max_num_seqs)
        self.buffers = DecodeBuffers.allocate(self.buckets[-1], max_blocks, device)

    def pick_bucket(self, n):
        for size in self.buckets:
            if size >= n:
                return size
        return None

    def fill(self, inputs, bucket):
        n, m = inputs.block_tables.shape
        rows = self.buffers.first(bucket)
        rows.clear()
        for name in ("input_ids", "positions", "slot_mapping", "seq_lens"):
            getattr(rows, name)[:n] = torch.as_tensor(getattr(inputs, name), device=self.device)
        rows.block_tables[:n, :m] = torch.as_tensor(inputs.block_tables, device=self.device)
