# expect: passed
def kv_bytes_per_token(config, dtype_bytes):
    numbers_in_a_key = config.num_kv_heads * config.head_dim
    keys_and_values = 0
    for _ in range(config.num_layers):
        keys_and_values += numbers_in_a_key + numbers_in_a_key
    return keys_and_values * dtype_bytes


def max_concurrency(memory_bytes, max_model_len, bytes_per_token):
    served, _ = divmod(memory_bytes, max_model_len * bytes_per_token)
    return served
