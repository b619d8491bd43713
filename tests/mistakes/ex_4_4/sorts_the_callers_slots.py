# expect: slot_mapping was changed
import torch


def write_kv(key, value, kv_cache, slot_mapping):
    flat = kv_cache.flatten(1, 2)
    flat[0, slot_mapping] = key
    flat[1, slot_mapping] = value
    slot_mapping.zero_()
