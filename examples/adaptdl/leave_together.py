"""Leave after the same step on every replica when one of them is told to stop: an agreement that is one step behind.

    asynccoll run -n 2 examples/adaptdl/leave_together.py

Each step starts the question "has anybody been told to stop?" and looks at the answer to the last one, which travelled while the
step was computed. So nobody leaves in the step of the signal, and all leave in the same one after it.
"""

import os
import signal

from asynccoll import collective

RANK, REPLICAS = int(os.environ["ASYNCCOLL_RANK"]), int(os.environ["ASYNCCOLL_WORLD_SIZE"])
told = False


def stop(signum, frame):
    global told
    told = True


def either(a, b):
    return a or b


signal.signal(signal.SIGTERM, stop)
collective.initialize()
answer = collective.allreduce_async(told, either)
for step in range(1000):
    sum(range(10_000))  # the work of a step
    if step == 5 and RANK == REPLICAS - 1:
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler would: the last replica alone hears of it
    if answer.result():
        break
    answer = collective.allreduce_async(told, either)

steps = collective.allreduce([step], lambda a, b: a + b)
assert steps == [6] * REPLICAS, steps
if RANK == 0:
    print(f"told to stop in step 5, all {REPLICAS} replicas left in step {step}")
collective.teardown()  # an AdaptDL job would save its state now and exit with 143
