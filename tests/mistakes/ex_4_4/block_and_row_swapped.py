# expect: block and row are swapped. The block is slot // block_size.
def write_kv(key, value, kv_cache, slot_mapping):
    size = kv_cache.shape[2]
    for t, slot in enumerate(slot_mapping.tolist()):
        kv_cache[0, slot % size, slot // size] = key[t]
        kv_cache[1, slot % size, slot // size] = value[t]
