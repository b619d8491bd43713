# expect: passed
from minivllm.core.request import RequestStatus
from minivllm.core.scheduler import Scheduler as Base


class Scheduler(Base):
    def pick_victim(self):
        order = sorted(self.running, key=lambda r: r.sort_key) if self.policy == "priority" else self.running
        return order[-1]

    def preempt(self, request):
        self.kv_cache_manager.free(request)
        self.running = [other for other in self.running if other is not request]
        self.waiting.prepend(request)
        self.preempted_req_ids += [request.request_id]
        request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
        request.spec_token_ids.clear()
        request.num_preemptions = request.num_preemptions + 1
