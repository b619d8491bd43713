# expect: passed
import torch


class ContiguousKVCache:
    def __init__(self, num_layers, max_len, num_kv_heads, head_dim, dtype=torch.float32, device="cpu"):
        self.max_len = max_len
        self.kv = torch.zeros(num_layers, 2, max_len, num_kv_heads, head_dim, dtype=dtype, device=device)
        self.lengths = [0] * num_layers

    def append(self, layer, k, v):
        if self.lengths[layer] + len(k) > self.max_len:
            raise ValueError(f"layer {layer} holds {self.lengths[layer]} tokens; max_len is {self.max_len}")
        for key, value in zip(k, v):
            self.kv[layer, :, self.lengths[layer]] = torch.stack([key, value])
            self.lengths[layer] += 1

    def view(self, layer):
        k, v = self.kv[layer]
        return [k[: self.lengths[layer]], v[: self.lengths[layer]]]
