# expect: returned the text 'stop'
import minivllm.core.scheduler
from minivllm.core.step import FinishReason


class Scheduler(minivllm.core.scheduler.Scheduler):
    def finish_reason(self, request, token_id):
        if token_id in request.stop_eos_ids:
            return "stop"
        if token_id in request.stop_token_ids:
            return "stop"
        if request.num_output_tokens >= request.max_tokens:
            return "length"
        return None
