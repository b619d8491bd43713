# expect: The worker hears of it|its request_id is wanted
import minivllm.core.scheduler
from minivllm.core.request import RequestStatus


class Scheduler(minivllm.core.scheduler.Scheduler):
    def pick_victim(self):
        if self.policy == "priority":
            return max(self.running, key=lambda request: request.sort_key)
        return self.running[-1]

    def preempt(self, request):
        self.kv_cache_manager.free(request)
        self.running.remove(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        request.num_preemptions += 1
        self.preempted_req_ids.append(request)
        self.waiting.prepend(request)
