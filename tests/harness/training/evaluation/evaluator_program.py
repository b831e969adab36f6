"""An evaluator whose evaluation says where it is: `evaluator_program.py LOGDIR [STEP]`, which blocks at that step."""

import sys
import threading

import harness
import runtime as rt

logdir, blocks_at = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None
value = rt.Variable(0.0, name="value")
harness.get_or_create_global_step()


def evaluate(session: rt.Session, step: int) -> dict[str, float]:
    print(f"EVALUATES {step}", flush=True)
    if step == blocks_at:
        threading.Event().wait()
    return {"accuracy": float(session.run(value))}


harness.Evaluator(evaluate, logdir, best_by="accuracy", silence_secs=0).run()
print("OVER", flush=True)
