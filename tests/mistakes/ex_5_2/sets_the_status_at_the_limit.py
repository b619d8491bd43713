# expect: Only say why
from minivllm.core.request import RequestStatus
from minivllm.core.step import FinishReason


class Scheduler:
    def finish_reason(self, request, token_id):
        if token_id in request.stop_eos_ids | request.stop_token_ids:
            return FinishReason.STOP
        if len(request.output_token_ids) == request.max_tokens:
            request.status = RequestStatus.FINISHED
            return FinishReason.LENGTH
        return None
