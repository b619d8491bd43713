# expect: memory that __init__ reserved
import torch


class ContiguousKVCache:
    def __init__(self, num_layers, max_len, num_kv_heads, head_dim, dtype=torch.float32, device="cpu"):
        self.max_len = max_len
        self.kv = torch.zeros(num_layers, 2, max_len, num_kv_heads, head_dim, dtype=dtype, device=device)
        empty = torch.zeros(0, num_kv_heads, head_dim)
        self.keys, self.values = [empty] * num_layers, [empty] * num_layers

    def append(self, layer, k, v):
        if len(self.keys[layer]) + len(k) > self.max_len:
            raise ValueError(f"layer {layer} holds {len(self.keys[layer])} of {self.max_len} tokens")
        self.keys[layer] = torch.cat([self.keys[layer], k])
        self.values[layer] = torch.cat([self.values[layer], v])

    def view(self, layer):
        return self.keys[layer], self.values[layer]
