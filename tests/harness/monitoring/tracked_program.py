"""One chief with a tracker.

python -m tests.harness.monitoring.tracked_program TRACKER LOGDIR LAST_STEP [--monitored] [--wait]

With --wait it says "trained" at its last step and waits there to be killed.
"""

import argparse
import signal

from absl import logging

import harness
import runtime as rt

parser = argparse.ArgumentParser()
parser.add_argument("tracker", choices=("wandb", "mlflow"))
parser.add_argument("--store", help="where MLflow keeps runs")
parser.add_argument("logdir")
parser.add_argument("last_step", type=int)
parser.add_argument("--monitored", action="store_true")
parser.add_argument("--wait", action="store_true")


def tracker(options: argparse.Namespace) -> harness.Tracker:
    config = {"rate": 0.5, "layers": [3, 2], "last_step": options.last_step}
    if options.tracker == "wandb":
        return harness.WandbTracker(config, project="digits", mode="offline")
    return harness.MlflowTracker("digits", config, tracking_uri=options.store)


def main(options: argparse.Namespace) -> None:
    step = harness.get_or_create_global_step()
    more = step.assign_add(1)
    harness.summary.scalar("loss", 1.0 / (1.0 + step))
    merged = harness.summary.merge_all()
    if options.monitored:
        session = harness.MonitoredTrainingSession(
            checkpoint_dir=options.logdir,
            save_checkpoint_steps=1,
            save_summaries_steps=1,
            tracker=tracker(options),
            hooks=[harness.StopAtStepHook(last_step=options.last_step)],
        )
        with session as monitored:
            while not monitored.should_stop():
                monitored.run(more)
                if options.wait:
                    wait(monitored, step, options)
        return
    supervisor = harness.Supervisor(logdir=options.logdir, summary_op=None, tracker=tracker(options))
    with supervisor.managed_session() as managed:
        while not supervisor.should_stop() and managed.run(step) < options.last_step:
            summary, number = managed.run([merged, more])
            supervisor.summary_computed(managed, summary, int(number))
        supervisor.saver.save(managed, supervisor.save_path, global_step=step)
        if options.wait:
            wait(managed, step, options)


def wait(session: harness.ManagedSession, step: rt.Variable, options: argparse.Namespace) -> None:
    if int(session.run(step)) >= options.last_step - 1:
        print("trained", flush=True)
        signal.pause()


if __name__ == "__main__":
    logging.set_verbosity("info")
    with rt.Graph().as_default():
        main(parser.parse_args())
