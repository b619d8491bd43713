# expect: swapped
def step_time(flops, bytes, launches, device):
    return max(flops / device.bandwidth, bytes / device.flops) + launches * device.launch_overhead
