"""A job of a Ray cluster: has the decode worker of the node that it runs on continue a text.

ray job submit --address=http://127.0.0.1:8265 --working-dir=examples -- python job.py TEXT
"""

import sys

import ray

from decode_worker.cluster import NAMESPACE, actor_name
from decode_worker.scheduler import Request

NEW_TOKENS = 32


def main(text: str) -> None:
    ray.init(address="auto", namespace=NAMESPACE)
    worker = ray.get_actor(actor_name(ray.get_runtime_context().get_node_id()))
    prompt = ray.get(worker.encode.remote(text))
    for answer in worker.generate.remote(Request(prompt, NEW_TOKENS)):
        output = ray.get(answer)
        print(output.text, end="", flush=True)
    print(
        f"\n{output.usage.generated} tokens behind {output.usage.prompt}, {output.usage.reused} of them stored before"
    )


if __name__ == "__main__":
    main(sys.argv[1])
