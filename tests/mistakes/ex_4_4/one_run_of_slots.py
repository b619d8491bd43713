# expect: belongs to another token, and was overwritten
import torch


def write_kv(key, value, kv_cache, slot_mapping):
    flat = kv_cache.flatten(1, 2)
    if len(key):
        first = int(slot_mapping[0])
        flat[0, first : first + len(key)] = key
        flat[1, first : first + len(key)] = value
