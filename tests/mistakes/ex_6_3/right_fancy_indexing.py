# expect: passed
import numpy as np


def build_metadata(num_computed_tokens, num_scheduled_tokens, block_tables, block_size, map_slots):
    query_start_loc = np.zeros(len(num_scheduled_tokens) + 1, dtype=np.int32)
    np.cumsum(num_scheduled_tokens, out=query_start_loc[1:])
    rows = np.repeat(np.arange(len(num_scheduled_tokens)), num_scheduled_tokens)
    positions = num_computed_tokens[rows] + np.arange(len(rows)) - query_start_loc[rows]
    slots = block_tables[rows, positions // block_size] * block_size + positions % block_size
    return [query_start_loc, num_computed_tokens + num_scheduled_tokens, positions, slots]
