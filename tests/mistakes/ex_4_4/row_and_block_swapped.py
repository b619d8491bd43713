# expect: Slot 4 (block 1, row 0) should hold the key of token 0
import torch


def write_kv(key, value, kv_cache, slot_mapping):
    size = kv_cache.shape[1]
    for t, slot in enumerate(slot_mapping.tolist()):
        kv_cache[0, slot % size, slot // size] = key[t]
        kv_cache[1, slot % size, slot // size] = value[t]
