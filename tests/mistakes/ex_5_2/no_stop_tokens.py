# expect: in request.stop_token_ids
import minivllm.core.scheduler
from minivllm.core.step import FinishReason


class Scheduler(minivllm.core.scheduler.Scheduler):
    def finish_reason(self, request, token_id):
        if token_id in request.stop_eos_ids:
            return FinishReason.STOP
        if request.num_output_tokens >= request.max_tokens:
            return FinishReason.LENGTH
        return None
