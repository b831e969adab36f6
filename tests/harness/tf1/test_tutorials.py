"""What the classic tutorials show, with servers of this process and some that are killed: sharing, placing, waiting."""

import pathlib
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import harness.tf1 as tf
from tests.runtime.kit import addresses, processes


@pytest.fixture(autouse=True)
def own_graph() -> Iterator[None]:
    with tf.Graph().as_default():
        yield


@pytest.fixture
def two_tasks() -> Iterator[tuple[tf.train.Server, tf.train.Server]]:
    cluster = tf.train.ClusterSpec(addresses(local=2))
    with tf.train.Server(cluster, job_name="local", task_index=0) as first:
        with tf.train.Server(cluster, job_name="local", task_index=1) as second:
            yield first, second


def test_hello_world_runs_locally() -> None:
    """A constant is fetched from a local server, until the session is closed."""
    hello = tf.constant("Hello, distributed world!")
    server = tf.train.Server.create_local_server()
    try:
        sess = tf.Session(server.target)
        assert sess.run(hello) == b"Hello, distributed world!"
        assert server.target.startswith("grpc://localhost:")
        assert [d.name for d in sess.list_devices()] == ["/job:local/replica:0/task:0/device:CPU:0"]
        sess.close()
        with pytest.raises(RuntimeError, match="closed Session"):
            sess.run(hello)
    finally:
        server.stop()


def test_servers_share_variables_by_name(two_tasks: tuple) -> None:
    """Two servers share a variable by its name."""
    first, second = two_tasks
    v = tf.Variable(tf.zeros([2]), name="shared")
    with tf.Session(first.target) as one, tf.Session(second.target) as other:
        one.run(tf.global_variables_initializer())
        one.run(v.assign_add([1.0, 2.0]))
        assert other.run(v).tolist() == [1, 2]
        other.run(v.assign_add([10.0, 10.0]))
        assert one.run(v).tolist() == [11, 12]
    with tf.Graph().as_default():  # another program that knows no more than the name
        again = tf.Variable([5.0, 5.0], name="shared")
        with tf.Session(second.target) as sess:
            assert sess.run(tf.report_uninitialized_variables()).size == 0
            assert sess.run(again).tolist() == [11, 12]


def test_trace_shows_the_owners(two_tasks: tuple) -> None:
    """A trace shows which task owns each operation."""
    _, second = two_tasks
    with tf.device("/job:local/task:1"):
        mine = tf.Variable([3.0], name="mine")
    nobodys = tf.Variable([4.0], name="nobodys")
    product = tf.multiply(mine, nobodys, name="product")
    assert (mine.device, nobodys.device, product.device) == ("/job:local/task:1", "", "")
    with tf.Session(second.target) as sess:
        sess.run(tf.global_variables_initializer())
        metadata = tf.RunMetadata()
        options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
        assert sess.run(product, options=options, run_metadata=metadata).tolist() == [12.0]
    where = {
        node.node_name: stats.device
        for stats in metadata.step_stats.dev_stats
        for node in stats.node_stats
    }
    first_task, second_task = (f"/job:local/replica:0/task:{i}/device:CPU:0" for i in (0, 1))
    assert where["nobodys"] == first_task, "what nobody placed is on the first task, whoever asks"
    assert where["mine"] == where["product"] == second_task


def test_graphs_are_not_mirrored(two_tasks: tuple) -> None:
    """A graph of one client is not visible to another, and its variables are."""
    first, second = two_tasks
    mine, yours = tf.Graph(), tf.Graph()
    with mine.as_default():
        v = tf.Variable(7, name="v")
        with tf.Session(first.target) as sess:
            sess.run(v.initializer)
    assert yours.get_operations() == []
    with yours.as_default(), tf.Session(second.target) as sess:
        with pytest.raises(ValueError, match="no operation 'v'"):
            sess.run("v:0")
        with pytest.raises(ValueError, match="not an element of this graph"):
            sess.run(v)
        assert sess.run(tf.Variable(0, name="v")) == 7, "the graph is not there, but the value is"


def test_session_waits_for_all_tasks() -> None:
    """A session waits until all tasks have joined, and names the missing task at its time limit."""
    cluster = addresses(worker=2)
    made: list = []
    with tf.train.Server(cluster, "worker", 0) as first:
        with pytest.raises(
            tf.errors.DeadlineExceededError, match="/job:worker/(replica:0/)?task:1"
        ):
            tf.Session(first.target, config=tf.ConfigProto(operation_timeout_in_ms=500))
        alone = tf.ConfigProto(device_filters=["/job:worker/task:0"])
        with tf.Session(first.target, config=alone) as sess:
            assert sess.run(tf.constant(1)) == 1

        graph = tf.get_default_graph()

        def connect() -> None:
            made.append(tf.Session(first.target, graph))

        waiting = threading.Thread(target=connect)
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive() and not made
        with tf.train.Server(cluster, "worker", 1):
            waiting.join(100)
            assert len(made) == 1
            with tf.device("/job:worker/task:1"):
                assert made[0].run(tf.constant(2) * 3) == 6
            made[0].close()


@pytest.mark.cluster
def test_killed_server_leaves_and_returns() -> None:
    """Steps fail for a killed task only, and a new session works with its successor."""
    cluster = addresses(ps=1, worker=1)
    with tf.device("/job:ps"):
        v = tf.Variable(0, name="v")
    with tf.device("/job:worker"):
        here = tf.constant(5) + 1
    add = v.assign_add(1)
    init = tf.global_variables_initializer()
    missing = tf.report_uninitialized_variables()
    with tf.train.Server(cluster, "worker", 0) as server, processes(cluster, ("ps", 0)) as (ps,):
        sess = tf.Session(server.target)
        sess.run(init)
        assert sess.run(add) == 1
        ps.kill()
        assert sess.run(here) == 6, "steps that do not touch the dead task go on"
        with pytest.raises(tf.errors.UnavailableError, match="/job:ps"):
            sess.run(add, timeout_secs=20)
        ps.restart()
        deadline = time.monotonic() + 30
        while True:
            try:
                sess.run(add, timeout_secs=20)
            except tf.errors.AbortedError:
                break  # it is another process of the task, without what it knew
            except tf.errors.UnavailableError:
                assert time.monotonic() < deadline
        sess.close()
        with tf.Session(server.target) as fresh:
            assert fresh.run(missing).tolist() == [b"v"]
            with pytest.raises(tf.errors.FailedPreconditionError, match="v"):
                fresh.run(add)
            fresh.run(init)
            assert fresh.run(add) == 1


def test_stopped_server_leaves_and_returns(two_tasks: tuple) -> None:
    """Steps fail for a stopped server of this process only, and a new session finds its successor."""
    first, second = two_tasks
    with tf.device("/job:local/task:1"):
        v = tf.Variable(1, name="v")
    with tf.device("/job:local/task:0"):
        here = tf.constant(2) * 3
    with tf.Session(first.target) as sess:
        sess.run(v.initializer)
        second.stop()
        assert sess.run(here) == 6
        with pytest.raises(
            tf.errors.UnavailableError, match="/job:local/task:1: its server has stopped"
        ):
            sess.run(v)
        with tf.train.Server(first.cluster, "local", 1):
            with pytest.raises(tf.errors.AbortedError, match="/job:local/task:1: restarted"):
                sess.run(v)
            with tf.Session(first.target) as fresh:
                assert fresh.run(tf.report_uninitialized_variables([v])).tolist() == [b"v"]


def test_workers_wait_for_the_chief(tmp_path: pathlib.Path) -> None:
    """A worker waits until the chief has initialized."""
    cluster = addresses(ps=1, worker=2)
    ready = threading.Event()
    seen: list = []

    def work(index: int, server: tf.train.Server) -> None:
        with tf.Graph().as_default():
            with tf.device(tf.train.replica_device_setter(cluster=cluster)):
                step = tf.Variable(41, name="global_step", trainable=False)
            sv = tf.train.Supervisor(
                is_chief=index == 0,
                logdir=str(tmp_path),
                global_step=step,
                recovery_wait_secs=1,
                save_summaries_secs=0,
            )
            if index == 0:
                ready.wait(20)
            sess = sv.prepare_or_wait_for_session(server.target, start_standard_services=False)
            seen.append((index, int(sess.run(step))))
            sess.close()
            sv.stop()

    with (
        tf.train.Server(cluster, "ps", 0),
        tf.train.Server(cluster, "worker", 0) as chief,
        tf.train.Server(cluster, "worker", 1) as other,
    ):
        threads = [threading.Thread(target=work, args=item) for item in ((1, other), (0, chief))]
        for thread in threads:
            thread.start()
        threads[0].join(0.5)
        assert threads[0].is_alive() and seen == [], "the worker waits, and initialises nothing"
        ready.set()
        for thread in threads:
            thread.join(30)
    assert sorted(seen) == [(0, 41), (1, 41)]


@pytest.mark.cluster
def test_array_is_reduced_over_workers() -> None:
    """Two workers each reduce half of a fed array."""
    cluster = addresses(ps=1, worker=2)
    x = tf.placeholder(tf.float32, [100], name="x")
    with tf.device("/job:worker/task:0"):
        first = tf.slice(x, [0], [50])
        low = tf.reduce_mean(first)
    with tf.device("/job:worker/task:1"):
        second = tf.slice(x, [50], [-1])
        high = tf.reduce_mean(second)
        mean = (low + high) / 2
    values = np.arange(100)
    with (
        tf.train.Server(cluster, "worker", 0) as server,
        processes(cluster, ("ps", 0), ("worker", 1)),
    ):
        with tf.Session(server.target) as sess:
            metadata = tf.RunMetadata()
            options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
            assert sess.run(mean, {x: values}, options, metadata) == values.mean()
    busy = {stats.device for stats in metadata.step_stats.dev_stats if len(stats.node_stats)}
    assert {f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in (0, 1)} <= busy


@pytest.mark.parametrize("unit", ["/cpu:0", "/gpu:0"])
def test_matrix_product_obeys_its_device(unit: str) -> None:
    """A matrix product runs on the chosen device or is refused with the devices that exist."""
    size = 200
    with tf.device(unit):
        random = tf.random_uniform([size, size], minval=0, maxval=1, seed=3)
        total = tf.reduce_sum(tf.matmul(random, tf.transpose(random)))
    with tf.Session() as sess:
        if unit == "/gpu:0" and not any(":GPU:" in d.name for d in sess.list_devices()):
            with pytest.raises(
                tf.errors.InvalidArgumentError, match="asks for '/gpu:0', and there are: .*CPU:0"
            ):
                sess.run(total)
            return
        sess.run(total)
        started = time.perf_counter()
        result = sess.run(total)
        took = time.perf_counter() - started
    assert result == pytest.approx(size * size * size / 4, rel=0.1)
    assert took > 0


def test_queue_tells_ps_of_end() -> None:
    """A queue on the ps counts the workers that are done."""
    cluster = addresses(ps=1, worker=2)

    def queue() -> tf.FIFOQueue:
        with tf.device("/job:ps/task:0"):
            return tf.FIFOQueue(2, tf.int32, shared_name="done_queue")

    def worker(server: tf.train.Server) -> None:
        with tf.Graph().as_default():
            done = queue().enqueue(1)
            with tf.Session(server.target) as sess:
                sess.run(done)

    with (
        tf.train.Server(cluster, "ps", 0) as ps,
        tf.train.Server(cluster, "worker", 0) as one,
        tf.train.Server(cluster, "worker", 1) as two,
    ):
        threads = [threading.Thread(target=worker, args=(s,)) for s in (one, two)]
        for thread in threads:
            thread.start()
        taken = queue().dequeue()
        with tf.Session(ps.target) as sess:
            assert [sess.run(taken) for _ in range(2)] == [1, 1]
        for thread in threads:
            thread.join(100)


def test_queue_runner_fills_the_queue() -> None:
    """A queue runner fills a queue beside training."""
    queue = tf.RandomShuffleQueue(10, 0, [tf.float32], shapes=[[2]], seed=1)
    runner = tf.train.QueueRunner(queue, [queue.enqueue([tf.random_uniform([2])])] * 2)
    tf.train.add_queue_runner(runner)
    batch = queue.dequeue_many(4)
    with tf.Session() as sess:
        coord = tf.train.Coordinator()
        threads = tf.train.start_queue_runners(sess, coord)
        try:
            shapes = [np.shape(sess.run(batch)) for _ in range(5)]
        finally:
            coord.request_stop()
            coord.join(threads, stop_grace_period_secs=20)
    assert shapes == [(4, 2)] * 5 and len(threads) >= 2


def test_monitored_session_continues_from_checkpoint(tmp_path: pathlib.Path) -> None:
    """A monitored session stops at its step, saves, and continues from there."""

    def train(last_step: int) -> int:
        with tf.Graph().as_default():
            step = tf.train.get_or_create_global_step()
            w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
            loss = tf.reduce_sum(tf.square(w))
            tf.summary.scalar("loss", loss)
            train_op = tf.train.AdagradOptimizer(0.1).minimize(loss, global_step=step)
            hooks = [tf.train.StopAtStepHook(last_step=last_step), tf.train.NanTensorHook(loss)]
            steps = 0
            with tf.train.MonitoredTrainingSession(
                checkpoint_dir=str(tmp_path), hooks=hooks
            ) as sess:
                while not sess.should_stop():
                    sess.run(train_op)
                    steps += 1
            return steps

    assert train(5) == 5
    assert train(8) == 3, "it goes on from the checkpoint"
    assert tf.train.load_variable(str(tmp_path), "global_step") == 8


def test_supervisor_has_its_first_names(tmp_path: pathlib.Path) -> None:
    """A Supervisor has the methods of its first version."""
    step = tf.Variable(0, name="global_step", trainable=False)
    add = step.assign_add(1)
    calls = []
    sv = tf.train.Supervisor(logdir=str(tmp_path), global_step=step, save_summaries_secs=0)
    sess = sv.PrepareSession()
    loop = sv.Loop(0.05, target=lambda: calls.append(sess.run(add)))
    while len(calls) < 3:
        assert not sv.ShouldStop()
    sv.RequestStop()
    sv.WaitForStop()
    sv.Stop([loop])
    sess.close()
    assert isinstance(sess, tf.Session) and tf.train.latest_checkpoint(str(tmp_path)) is not None
