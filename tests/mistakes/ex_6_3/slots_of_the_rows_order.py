# expect: of table
import numpy as np


def build_metadata(num_computed_tokens, num_scheduled_tokens, block_tables, block_size, map_slots):
    num_rows, num_blocks = block_tables.shape
    starts = np.concatenate([[0], num_scheduled_tokens.cumsum()])
    first_position = num_computed_tokens - starts[:-1]
    positions = np.arange(starts[-1]) + first_position.repeat(num_scheduled_tokens)
    behind = np.arange(num_rows) * (num_blocks * block_size - block_size)
    slots = map_slots(positions + behind.repeat(num_scheduled_tokens), block_tables.reshape(-1), block_size)
    return starts, num_computed_tokens + num_scheduled_tokens, positions, slots
