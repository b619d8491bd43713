# expect: belongs to another token, and was overwritten
import torch


def write_kv(key, value, kv_cache, slot_mapping):
    for t, slot in enumerate(slot_mapping.tolist()):
        kv_cache[0, slot // kv_cache.shape[2]] = key[t]
        kv_cache[1, slot // kv_cache.shape[2]] = value[t]
