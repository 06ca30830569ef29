"""Print what traceinsight (HolisticTraceAnalysis) says about one trace, as JSON.

    python in_hta.py TRACE

It runs in an environment with traceinsight. These are the analyses of its README that concern one rank without
collectives. They give figures; none of them is advice.
"""

import json
import os
import sys

# HolisticTraceAnalysis rounds times to µs unless this is set, and its temporal breakdown then fails for some traces.
os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"

from hta.trace_analysis import TraceAnalysis


def main():
    analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="")
    parts = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    idle, _ = analysis.get_idle_time_breakdown(ranks=[0], visualize=False)
    kinds, kernels = analysis.get_gpu_kernel_breakdown(visualize=False)
    analysis.get_cuda_kernel_launch_stats(ranks=[0], visualize=False)
    figures = [
        f"GPU: idle {parts.idle_time_pctg}%, computing {parts.compute_time_pctg}%, "
        f"other kernels {parts.non_compute_time_pctg}%"
    ]
    for stream, rows in idle.groupby("stream"):
        causes = ", ".join(f"{row.idle_category} {row.idle_time_ratio:.0%}" for row in rows.itertuples())
        figures.append(f"idle time of stream {stream}: {causes}")
    figures.append("kernel time: " + ", ".join(f"{row.kernel_type} {row.percentage}%" for row in kinds.itertuples()))
    named = kernels[kernels["name"] != "others"].sort_values("sum (us)", ascending=False)
    if len(named):
        figures.append(f"longest kernel: {named.iloc[0]['name'][:100]}")
    print(json.dumps({"advice": [], "figures": figures[:6]}))


if __name__ == "__main__":
    main()
