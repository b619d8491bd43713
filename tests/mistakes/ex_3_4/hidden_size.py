# expect: hidden_size is not what is kept
def kv_bytes_per_token(config, dtype_bytes):
    return 2 * config.num_layers * config.hidden_size * dtype_bytes


def max_concurrency(memory_bytes, max_model_len, bytes_per_token):
    return memory_bytes // (max_model_len * bytes_per_token)
