# expect: need not start at 0
import numpy as np


def slot_mapping(positions, block_table, block_size):
    i = np.arange(len(positions))
    return block_table[i // block_size] * block_size + i % block_size
