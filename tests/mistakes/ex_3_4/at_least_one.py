# expect: Not even one fits
def kv_bytes_per_token(config, dtype_bytes):
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype_bytes


def max_concurrency(memory_bytes, max_model_len, bytes_per_token):
    return max(1, memory_bytes // (max_model_len * bytes_per_token))
