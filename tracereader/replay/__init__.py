"""The recorded steps as a graph of CPU work, launches, GPU activities and waits, and the step's time after a change.

    graph = graph_of(trace)              # a Refused with its reason if the trace cannot be replayed
    graph.recorded_us                    # the step's recorded time; graph.step_us() is the replayed time
    cuda_graph(graph).step_us()          # the step's time after a change

A change is a function from a Graph to a Graph, and changes compose: without_waits(cuda_graph(graph), calls). A change
has to be made in all steps of graph.trace.steps, for example
without_waits(graph, [op for step in trace.steps for op in waits_of(step)]).
The changes (replay/changes.py):

- without_cpu_time(graph, spans): these spans of threads take no time. spans_of(ops) returns the spans of ops.
- without_ops(graph, ops): these ops and calls are removed together with the GPU work that they launch.
- without_waits(graph, calls): these runtime calls neither wait nor take time.
- without_work(graph, work): this GPU work is removed together with the ops that launch nothing else.
- with_smaller_graphs(graph, work): this work of CUDA graphs is removed, and their launches take less time.
- with_durations(graph, {work: us}): this GPU work takes the given times.
- fused(graph, [(work, us), ...]): each group of GPU work becomes one activity, launched once. The CPU time between its
  launches is removed if nothing else is launched there.
- cuda_graph(graph, runs): the launches of each run become one. Without runs it is those between two waits.
- overlapped(graph, work): this GPU work runs on a stream of its own, and waits for it end one step later.
- with_cpu_time(graph, [(track, ns, us), ...]): CPU time is added at these places.
- with_cpu_speed(graph, factor): all CPU time is multiplied by the factor. step_us_at(graph, factor) returns the step's
  time then. cpu_factor(graph, us) returns the factor for which the step takes a given time, for example the time
  without the profiler.

replay/graph.py lists what is modelled. The replay was compared with steps recorded before and after a change on an H200
(tests/test_replay.py). CUDA graphs are predicted within 10%, prefetched copies and the data loader of a GPU-bound step
within 5%, and a fused optimizer within 2% of a GPU-bound step and 15% of an overhead-bound one. The ops of an
overhead-bound step may run half as fast in one recording as in another (the committed pairs "syncs" and "loader"). The
replay cannot predict that.
"""

from tracereader.replay.graph import Graph, Reason, Refused
from tracereader.replay.recorded import graph_of

__all__ = ["Graph", "Reason", "Refused", "graph_of"]
