# expect: a number of its own
def kv_bytes_per_token(config, dtype_bytes):
    head_dim = config.hidden_size // config.num_heads
    return 2 * config.num_layers * config.num_kv_heads * head_dim * dtype_bytes


def max_concurrency(memory_bytes, max_model_len, bytes_per_token):
    return memory_bytes // (max_model_len * bytes_per_token)
