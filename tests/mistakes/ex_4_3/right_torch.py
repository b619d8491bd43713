# expect: passed
import torch


def slot_mapping(positions, block_table, block_size):
    positions, table = torch.from_numpy(positions), torch.from_numpy(block_table).long()
    return (table[positions // block_size] * block_size + positions % block_size).numpy()
