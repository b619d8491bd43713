# expect: counted from the first block
import numpy as np


def slot_mapping(positions, block_table, block_size):
    return block_table[0] * block_size + positions
