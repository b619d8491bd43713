# expect: One launch
def step_time(flops, bytes, launches, device):
    return max(flops / device.flops, bytes / device.bandwidth) + device.launch_overhead
