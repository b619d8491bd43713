# expect: is in entry 0 of the table
import numpy as np


def slot_mapping(positions, block_table, block_size):
    return block_table[positions % block_size % len(block_table)] * block_size + positions // block_size
