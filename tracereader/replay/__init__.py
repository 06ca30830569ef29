"""The recorded steps as a graph of CPU work, launches, GPU activities and waits; the step's time after a change.

    graph = graph_of(trace)              # a Refused, with its reason, where the trace cannot be replayed
    graph.recorded_us                    # the step's time as recorded; graph.step_us() is the same, replayed
    cuda_graph(graph).step_us()          # and after a change

A change is a function from a Graph to a Graph, and changes compose: without_waits(cuda_graph(graph), calls). Make a
change in all steps of graph.trace.steps, for example
without_waits(graph, [op for step in trace.steps for op in step.walk() if is_wait(op)]).
The changes (replay/changes.py):

- without_cpu_time(graph, spans): stretches of threads take no time; spans_of(ops) makes them of ops.
- without_ops(graph, ops): ops and calls are gone, with the GPU work that they launch.
- without_waits(graph, calls): runtime calls neither wait nor take time.
- without_work(graph, work): GPU work is gone, with the ops that launch nothing else.
- with_durations(graph, {work: us}): GPU work takes another time.
- fused(graph, [(work, us), ...]): each group of GPU work becomes one activity, launched once. The CPU time between its
  launches is gone, too, where nothing else is launched there.
- cuda_graph(graph): the launches between two waits become one.
- overlapped(graph, work): GPU work runs on a stream of its own, and what waited for it waits one step longer.
- with_cpu_time(graph, [(track, ns, us), ...]): more CPU time passes.
- with_cpu_speed(graph, factor): all CPU time is that many times as long. cpu_factor(graph, us) finds the factor by
  which the step takes a given time, as without the profiler.

What is modelled and what is not: replay/graph.py. Recorded before and after on an H200 (tests/test_replay.py): CUDA
graphs come out within 10%, prefetched copies and the data loader of a GPU-bound step within 5%, a fused optimizer
within 2% of a GPU-bound step and 15% of an overhead-bound one. An overhead-bound step's ops may run half as fast in
one recording as in the other (the committed pairs "syncs" and "loader"), which no replay can know.
"""

from tracereader.replay.changes import (
    cpu_factor,
    cuda_graph,
    fused,
    overlapped,
    spans_of,
    with_cpu_speed,
    with_cpu_time,
    with_durations,
    without_cpu_time,
    without_ops,
    without_waits,
    without_work,
)
from tracereader.replay.graph import Graph, Reason, Refused, graph_of, is_wait

__all__ = [
    "Graph",
    "Reason",
    "Refused",
    "cpu_factor",
    "cuda_graph",
    "fused",
    "graph_of",
    "is_wait",
    "overlapped",
    "spans_of",
    "with_cpu_speed",
    "with_cpu_time",
    "with_durations",
    "without_cpu_time",
    "without_ops",
    "without_waits",
    "without_work",
]
