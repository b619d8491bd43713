# expect: passed
import numpy as np


def slot_mapping(positions, block_table, block_size):
    entries, rows = np.divmod(positions, block_size)
    return np.take(block_table, entries) * block_size + rows
