# expect: passed
from minivllm.sim import cost_model


def streamed_parameters(config):
    q = config.hidden_size * config.num_heads * config.head_dim
    kv = q // config.num_heads * config.num_kv_heads
    return (2 * q + 2 * kv + 3 * config.hidden_size * config.intermediate_size) * config.num_layers + (
        config.vocab_size * config.hidden_size
    )


def decode_step_bytes(config, batch_size, context_len, dtype_bytes=2):
    kv = cost_model.kv_bytes_per_token(config, dtype_bytes=dtype_bytes)
    return batch_size * (context_len * kv) + dtype_bytes * streamed_parameters(config)
