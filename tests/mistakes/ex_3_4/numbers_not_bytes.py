# expect: not bytes: each takes
def kv_bytes_per_token(config, dtype_bytes):
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim


def max_concurrency(memory_bytes, max_model_len, bytes_per_token):
    return memory_bytes // (max_model_len * bytes_per_token)
