# expect: passed
import minivllm.core.scheduler
from minivllm.core.request import RequestStatus


class Scheduler(minivllm.core.scheduler.Scheduler):
    def pick_victim(self):
        victim = self.running[-1]
        if self.policy == "priority":
            for request in self.running:
                if (request.priority, request.arrival_time, request.arrival_index) > victim.sort_key:
                    victim = request
        return victim

    def preempt(self, request):
        self.kv_cache_manager.free(request)
        self.running.pop(self.running.index(request))
        request.num_preemptions += 1
        request.spec_token_ids = list()
        request.num_computed_tokens -= request.num_computed_tokens
        request.status = RequestStatus.PREEMPTED
        self.preempted_req_ids.append(request.request_id)
        self.waiting.prepend(request)
