# expect: passed
import torch

from minivllm.worker.graphs import DecodeBuffers, bucket_sizes
from minivllm.worker.operator_graph import OperatorGraph


class GraphRunner:
    def __init__(self, decode_step, max_num_seqs, max_blocks, device):
        self.decode_step = decode_step
        self.device = device
        self.buckets = bucket_sizes(max_num_seqs)
        self.buffers = DecodeBuffers.allocate(self.buckets[-1], max_blocks, device)
        self.graphs = {}

    def new_graph(self):
        return OperatorGraph()

    @torch.inference_mode()
    def capture(self):
        self.buffers.clear()
        for bucket in self.buckets:
            self.decode_step(self.buffers.first(bucket))
        for bucket in self.buckets[::-1]:
            self._record(bucket)

    def _record(self, bucket):
        graph = OperatorGraph()
        with graph.capture():
            self.graphs[bucket] = (self.decode_step(self.buffers.first(bucket)), graph)

    def replay(self, bucket):
        self.graphs[bucket][1].replay()
        return self.graphs[bucket][0]
