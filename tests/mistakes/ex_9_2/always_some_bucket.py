# expect: none of them holds
from minivllm.worker.graphs import DecodeBuffers, bucket_sizes, padded
from minivllm.worker.transfer import to_device


class GraphRunner:
    def __init__(self, decode_step, max_num_seqs, max_blocks, device):
        self.decode_step = decode_step
        self.device = device
        self.buckets = bucket_sizes(max_num_seqs)
        self.buffers = DecodeBuffers.allocate(self.buckets[-1], max_blocks, device)

    def pick_bucket(self, n):
        return next((size for size in self.buckets if size >= n), self.buckets[-1])

    def fill(self, inputs, bucket):
        arrays = (inputs.input_ids, inputs.positions, inputs.slot_mapping, inputs.seq_lens, inputs.block_tables)
        rows = [padded(array, bucket, value) for array, value in zip(arrays, (0, 0, 0, 1, 0))]
        targets = self.buffers.first(bucket).tensors()[:5]
        targets[-1] = targets[-1][:, : inputs.block_tables.shape[1]]
        for target, source in zip(targets, to_device(rows, self.device)):
            target.copy_(source)
