# expect: positions was changed in place
import numpy as np


def slot_mapping(positions, block_table, block_size):
    rows = positions % block_size
    positions //= block_size
    return block_table[positions] * block_size + rows
