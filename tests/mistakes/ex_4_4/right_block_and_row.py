# expect: passed
def write_kv(key, value, kv_cache, slot_mapping):
    size = kv_cache.shape[2]
    block, row = slot_mapping // size, slot_mapping % size
    kv_cache[0, block, row] = key
    kv_cache[1, block, row] = value
