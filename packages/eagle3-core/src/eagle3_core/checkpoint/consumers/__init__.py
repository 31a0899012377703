"""Who can be given a draft, one file each: the layouts and limits of engines and trainers."""

from eagle3_core.checkpoint.consumers import eagle, sglang, specforge, speculators, trtllm, vllm
from eagle3_core.checkpoint.consumers.base import Consumer

CONSUMERS: dict[str, Consumer] = {
    module.CONSUMER.name: module.CONSUMER
    for module in (specforge, sglang, vllm, speculators, eagle, trtllm)
}
