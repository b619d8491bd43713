# expect: look the block up
import numpy as np


def slot_mapping(positions, block_table, block_size):
    return positions // block_size * block_size + positions % block_size
