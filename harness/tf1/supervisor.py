"""``tf.train.Supervisor``: the harness's, with the names that its methods had at first."""

from __future__ import annotations

import harness


class Supervisor(harness.Supervisor):
    """``harness.Supervisor``; ``sv.PrepareSession``, ``sv.ShouldStop`` and the like are other names of its methods."""

    PrepareSession = harness.Supervisor.prepare_or_wait_for_session
    StartQueueRunners = harness.Supervisor.start_queue_runners
    StartStandardServices = harness.Supervisor.start_standard_services
    Stop = harness.Supervisor.stop
    RequestStop = harness.Supervisor.request_stop
    Loop = harness.Supervisor.loop
    ShouldStop = harness.Supervisor.should_stop
    StopOnException = harness.Supervisor.stop_on_exception
    WaitForStop = harness.Supervisor.wait_for_stop
    SummaryComputed = harness.Supervisor.summary_computed
