# expect: passed
def kv_bytes_per_token(config, dtype_bytes=2):
    return config.num_layers * 2 * config.head_dim * config.num_kv_heads * dtype_bytes


def max_concurrency(memory_bytes, max_model_len, bytes_per_token):
    return memory_bytes // bytes_per_token // max_model_len
