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
        for size in sorted(self.buckets, reverse=True):
            rows = self.buffers.first(size)
            for _ in range(2):
                self.decode_step(rows)
            recording = self.new_graph()
            with recording.capture():
                out = self.decode_step(rows)
            self.graphs[size] = {"graph": recording, "out": out}

    def replay(self, bucket):
        kept = self.graphs[bucket]
        kept["graph"].replay()
        return kept["out"].clone()
