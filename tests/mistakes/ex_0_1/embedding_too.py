# expect: only one row a token
from minivllm.sim.cost_model import kv_bytes_per_token


def streamed_parameters(config):
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (q + kv + kv) + q * config.hidden_size
    mlp = 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * (attention + mlp) + 2 * config.hidden_size * config.vocab_size


def decode_step_bytes(config, batch_size, context_len, dtype_bytes):
    weights = streamed_parameters(config) * dtype_bytes
    return weights + batch_size * context_len * kv_bytes_per_token(config, dtype_bytes)
