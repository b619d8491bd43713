# expect: passed
from minivllm.sim.cost_model import kv_bytes_per_token


def streamed_parameters(cfg):
    D, hidden, wide = cfg.head_dim, cfg.hidden_size, cfg.intermediate_size
    sizes = {
        "q": (hidden, cfg.num_heads * D),
        "k": (hidden, cfg.num_kv_heads * D),
        "v": (hidden, cfg.num_kv_heads * D),
        "o": (cfg.num_heads * D, hidden),
        "gate": (hidden, wide),
        "up": (hidden, wide),
        "down": (wide, hidden),
    }
    total = 0
    for _ in range(cfg.num_layers):
        for rows, columns in sizes.values():
            total += rows * columns
    return total + hidden * cfg.vocab_size


def decode_step_bytes(cfg, B, L, size):
    total = float(streamed_parameters(cfg) * size)
    for _ in range(B):
        total += L * kv_bytes_per_token(cfg, size)
    return total
