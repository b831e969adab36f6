"""One process of the single-operation benchmark: this project's runtime."""

import json
import sys
import time

import grpc
import jax
import numpy as np

import runtime as rt


def main(job: str, cluster_json: str, sizes_json: str, seconds: float) -> None:
    """Serves as the ps, or measures push+assign_add, pull+reduce and an empty gRPC call, for each size in bytes."""
    jax.config.update("jax_platforms", "cpu")
    cluster = json.loads(cluster_json)
    server = rt.Server(cluster, job, 0)
    if job == "ps":
        server.join()
        return
    session, operations = None, {}
    for size in json.loads(sizes_json):
        with rt.device("/job:ps/task:0"):
            variable = rt.Variable(np.zeros(size // 4, np.float32), name=f"v{size}")
        with rt.device("/job:worker/task:0"):
            value = rt.placeholder(np.float32, [size // 4], name=f"x{size}")
            total = rt.numpy.sum(variable)
        operations[size] = (variable.assign_add(value).op, total, value)
    session = rt.Session(server.target, config=rt.SessionConfig(start_timeout_secs=60.0))
    session.run(rt.global_variables_initializer())
    channel = grpc.insecure_channel(cluster["ps"][0])
    # The cheapest call there is to the same process.
    empty_call = channel.unary_unary("/grpc.health.v1.Health/Check", bytes, bytes)
    print("READY", flush=True)
    for line in sys.stdin:
        size = int(line)
        push, pull, value = operations[size]
        memory = np.empty(size + 64, np.uint8)
        start = -memory.ctypes.data % 64
        array = memory[start : start + size].view(np.float32)
        array[...] = 1.0
        found = {
            "grpc": timed(lambda: empty_call(b""), seconds),
            "push": timed(lambda push=push, value=value, array=array: session.run(push, {value: array}), seconds),
            "pull": timed(lambda pull=pull: session.run(pull), seconds),
        }
        print(json.dumps(found), flush=True)


def timed(call, seconds: float) -> float:
    """Median milliseconds of one call."""
    for _ in range(5):
        call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return float(np.median(times) * 1e3)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))
