"""The recorded steps as a graph of CPU work, launches, GPU activities and waits, and the step's time after a change.

    graph = graph_of(trace)              # a Refused with its reason if the trace cannot be replayed
    graph.recorded_us                    # the step's recorded time; graph.step_us() is the replayed time
    cuda_graph(graph).step_us()          # the step's time after a change

A change is a function from a Graph to a Graph, and changes compose: without_waits(cuda_graph(graph), calls). A change
has to be made in all steps of graph.trace.steps, for example
without_waits(graph, [op for step in trace.steps for op in waits_of(step)]). replay/changes.py has the changes.

replay/graph.py lists what is modelled. The replay was compared with steps recorded before and after a change on an H200
(tests/test_replay.py). CUDA graphs are predicted within 10%, prefetched copies and the data loader of a GPU-bound step
within 5%, and a fused optimizer within 2% of a GPU-bound step and 15% of an overhead-bound one. The ops of an
overhead-bound step may run half as fast in one recording as in another (the committed pairs "syncs" and "loader"). The
replay cannot predict that.
"""

from tracereader.replay.graph import Graph, Reason, Refused
from tracereader.replay.recorded import graph_of

__all__ = ["Graph", "Reason", "Refused", "graph_of"]
