# expect: passed
import numpy as np


def slot_mapping(positions, block_table, block_size):
    every = (block_table[:, None] * block_size + np.arange(block_size)).reshape(-1)
    return every[positions]
