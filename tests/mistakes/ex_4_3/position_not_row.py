# expect: position % block_size counts
import numpy as np


def slot_mapping(positions, block_table, block_size):
    return block_table[positions // block_size] * block_size + positions
