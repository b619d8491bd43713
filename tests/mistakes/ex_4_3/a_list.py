# expect: It should return a NumPy array of slots, and returned [13, 14]. np.array(...) makes one of it.
def slot_mapping(positions, block_table, block_size):
    return [int(block_table[p // block_size]) * block_size + int(p) % block_size for p in positions]
