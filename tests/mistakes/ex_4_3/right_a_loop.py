# expect: passed
import numpy as np


def slot_mapping(positions, block_table, block_size):
    slots = []
    for position in positions:
        block = block_table[position // block_size]
        slots.append(block * block_size + position % block_size)
    return np.array(slots)
