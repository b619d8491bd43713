# expect: Slot 6 (block 1, row 2) should hold the key of token 0
import torch


def write_kv(key, value, kv_cache, slot_mapping):
    for t, slot in enumerate(slot_mapping.tolist()):
        kv_cache[0, slot % kv_cache.shape[1], 0] = key[t]
        kv_cache[1, slot % kv_cache.shape[1], 0] = value[t]
