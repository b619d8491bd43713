# expect: takes integers. (np.zeros and np.empty make floats unless they are given a dtype, and / makes floats
import numpy as np


def slot_mapping(positions, block_table, block_size):
    return block_table[positions // block_size] * block_size + (positions / block_size % 1) * block_size
