# expect: which was added to what was there
def write_kv(key, value, kv_cache, slot_mapping):
    flat = kv_cache.flatten(1, 2)
    flat[0].index_add_(0, slot_mapping, key)
    flat[1].index_add_(0, slot_mapping, value)
