# expect: // cuts off
def step_time(flops, num_bytes, launches, device):
    return max(flops // device.flops, num_bytes // device.bandwidth) + launches * device.launch_overhead
