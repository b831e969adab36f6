"""A save or restore belongs to a session, and ends with it, whatever the client was doing when it died."""

import gc
import json
import pathlib
import weakref

import grpc
import numpy as np
import pytest

import harness
import runtime as rt
from runtime import timeouts
from tests.kit.changes import SetTimes
from tests.kit.processes import programs
from tests.kit.waits import until
from tests.runtime import kit
from tests.runtime.checkpoint import dying_client
from tests.runtime.stranger import ORDER, refused, stranger

pytestmark = pytest.mark.cluster

CLIENTS = [("chief", "commit"), ("script", "commit"), ("script", "write"), ("script", "bytes")]
"""What dies, and before which order. A chief comes first: the others order under its leadership."""


def test_killed_client_leaves_no_job(tmp_path: pathlib.Path, set_times: SetTimes) -> None:
    """A task gives up the saves and restores of killed clients and frees their memory."""
    # of the sessions that this ps runs for the scripts
    set_times(timeouts, LEASE_SECS=5.0)
    cluster = kit.addresses(ps=1, worker=1)
    limits = rt.Limits(checkpoint_jobs=len(CLIENTS))
    with (
        rt.Server(cluster, "ps", 0, limits=limits) as ps,
        rt.Graph().as_default(),
        programs() as start,
    ):
        w = dying_client.variable()
        participant = ps.worker.checkpoint_participant
        saver = harness.Saver([w])
        config = rt.SessionConfig(device_filters=("/job:ps",), start_timeout_secs=60)
        with rt.Session(ps.target, config=config) as session:
            session.run(w.assign(np.ones(dying_client.SIZE, np.float32)).op)
            saver.save(session, tmp_path / "m", 1)
            for kind, order in CLIENTS:
                module = "tests.runtime.checkpoint.dying_client"
                client = start(
                    "python", "-m", module, json.dumps(cluster), kind, str(tmp_path), order
                )
                client.expect("^in the middle$")
                client.kill()
            jobs = participant.jobs.list_jobs()
            assert len(jobs) == len(CLIENTS)
            with pytest.raises(rt.ResourceExhaustedError, match="checkpoint_jobs"):
                saver.save(session, tmp_path / "m", 2)
            # what a save has taken is old now
            session.run(w.assign_add(np.ones(dying_client.SIZE, np.float32)).op)
            held = [weakref.ref(array) for job in jobs for array in job.arrays if array is not None]
            assert held
            del jobs
            until(lambda: not participant.jobs.list_jobs(), "the end of the jobs")
            until(
                lambda: gc.collect() >= 0 and not any(array() is not None for array in held),
                "their memory",
            )
            for number in range(2, 2 + 2 * len(CLIENTS)):
                saver.save(session, tmp_path / "m", number)


def test_unconnected_session_owns_no_job() -> None:
    """A task begins no save or restore for a session without a connection."""
    with rt.Server(kit.addresses(local=1), "local", 0) as server, stranger(server) as they:
        they.order(pause=ORDER.Pause(job=7, seconds=5.0))
        they.session += 2
        with refused(grpc.StatusCode.UNAVAILABLE, "no connection"):
            they.order(take=ORDER.Take(job=7))


def test_snapshot_waits_for_session_connection() -> None:
    """A session that connects late, as to a restarted task, takes its snapshot under its later pause."""
    with rt.Server(kit.addresses(local=1), "local", 0) as server, stranger(server) as they:
        connect = they.connect
        they.connect = lambda: None  # type: ignore[method-assign]
        with refused(grpc.StatusCode.UNAVAILABLE, "no connection"):
            they.order(pause=ORDER.Pause(job=7, seconds=5.0))
        they.connect = connect  # type: ignore[method-assign]
        they.order(pause=ORDER.Pause(job=7, seconds=5.0))
        they.order(take=ORDER.Take(job=7))


def test_dropped_job_takes_no_late_order() -> None:
    """An order that comes after its job was dropped is refused and begins nothing."""
    with rt.Server(kit.addresses(local=1), "local", 0) as server, stranger(server) as they:
        they.order(pause=ORDER.Pause(job=7, seconds=5.0))
        they.order(drop=ORDER.Drop(job=7))
        they.order(pause=ORDER.Pause(job=7, seconds=5.0))
        with refused(grpc.StatusCode.ABORTED, "it was dropped"):
            they.order(take=ORDER.Take(job=7))
        assert not server.worker.checkpoint_participant.jobs.list_jobs()
