# expect: a NumPy array of slots
import numpy as np


def slot_mapping(positions, block_table, block_size):
    return int(block_table[positions[-1] // block_size] * block_size + positions[-1] % block_size) if len(positions) else 0
