# expect: passed
import numpy as np


def build_metadata(num_computed_tokens, num_scheduled_tokens, block_tables, block_size, map_slots):
    starts, positions, slots = [0], [], []
    for computed, n, table in zip(num_computed_tokens, num_scheduled_tokens, block_tables):
        own = np.arange(computed, computed + n)
        positions.append(own)
        slots.append(map_slots(own, table, block_size))
        starts.append(starts[-1] + int(n))
    seq_lens = np.add(num_computed_tokens, num_scheduled_tokens)
    return np.array(starts), seq_lens, np.concatenate(positions), np.concatenate(slots)
