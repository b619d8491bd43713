# expect: The array has dtype float64: [13.0, 14.0]. A slot is an index, so it takes integers.
import numpy as np


def slot_mapping(positions, block_table, block_size):
    slots = np.zeros(len(positions))
    for i, position in enumerate(positions):
        slots[i] = block_table[position // block_size] * block_size + position % block_size
    return slots
