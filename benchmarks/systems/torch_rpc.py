"""PyTorch RPC: each worker sends its gradients and gets fresh parameters in one fused call to each ps, one thread each.

Written as the RPC parameter-server tutorial says, with the two calls fused: the fastest shape its
API allows. Runs in an environment with torch; shares nothing with this project but the protocol
module beside it.
"""

import json
import os
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import torch  # noqa: E402
import torch.distributed.rpc as rpc  # noqa: E402

from benchmarks.systems.protocol import initial, measure  # noqa: E402

RATE = 0.1


class Shard:
    """The parameters of one ps."""

    instance: "Shard"

    def __init__(self, names, hidden):
        self.lock = threading.Lock()
        values = initial(hidden)
        self.params = {k: torch.from_numpy(values[k]) for k in names}
        self.steps = 0


def push_pull(gradients):
    """Applies gradients and gives the new parameters and the step count."""
    shard = Shard.instance
    with shard.lock, torch.no_grad():
        for name, gradient in gradients.items():
            shard.params[name].sub_(gradient, alpha=RATE)
        if gradients:
            shard.steps += 1
        return {k: v.clone() for k, v in shard.params.items()}, shard.steps


def main(job, index, cluster_json, hidden, options_json):
    """Serves as a ps, or measures as a worker."""
    torch.set_num_threads(1)
    cluster = json.loads(cluster_json)
    ps, workers = len(cluster["ps"]), len(cluster["worker"])
    host, port = cluster["ps"][0].rsplit(":", 1)
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
    shards = (
        [["w1", "b1", "w2", "b2"][i::ps] for i in range(ps)]
        if ps > 1
        else [["w1", "b1", "w2", "b2"]]
    )
    rank = index if job == "ps" else ps + index
    if job == "ps":
        Shard.instance = Shard(shards[index], hidden)
    rpc.init_rpc(f"{job}{index}", rank=rank, world_size=ps + workers)
    if job == "worker":

        def exchange(gradients):
            calls = [
                rpc.rpc_async(
                    f"ps{i}", push_pull, args=({k: gradients[k] for k in names if k in gradients},)
                )
                for i, names in enumerate(shards)
            ]
            params, step = {}, 0
            for i, call in enumerate(calls):
                part, count = call.wait()
                params.update(part)
                step = count if i == 0 else step
            return params, step

        held = [exchange({})[0]]

        def step(images, labels):
            params = {k: v.requires_grad_() for k, v in held[0].items()}
            hidden_layer = torch.sigmoid(torch.from_numpy(images) @ params["w1"] + params["b1"])
            logits = hidden_layer @ params["w2"] + params["b2"]
            loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels).long())
            names = list(params)
            gradients = torch.autograd.grad(loss, [params[k] for k in names])
            held[0], count = exchange(dict(zip(names, gradients, strict=True)))
            return float(loss), count

        measure(step, seed=index)
        os._exit(0)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
