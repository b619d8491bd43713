# expect: a larger bucket's graph was run
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
        for bucket in reversed(self.buckets):
            buffers = self.buffers.first(bucket)
            self.decode_step(buffers)
            graph = self.new_graph()
            with graph.capture():
                hidden = self.decode_step(buffers)
            self.graphs[bucket] = graph, hidden

    def replay(self, bucket):
        larger = min([size for size in self.buckets if size > bucket], default=bucket)
        graph, hidden = self.graphs[larger]
        graph.replay()
        return hidden[:bucket]
