# expect: It should return an integer
def streamed_parameters(config):
    c = config
    return 1.0 * c.hidden_size * (
        c.vocab_size + c.num_layers * (2 * c.head_dim * (c.num_heads + c.num_kv_heads) + 3 * c.intermediate_size)
    )


def decode_step_bytes(config, batch_size, context_len, dtype_bytes):
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return dtype_bytes * (streamed_parameters(config) + batch_size * context_len * per_token)
