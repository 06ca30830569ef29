"""One run's step, as input of a comparison."""

from collections import Counter
from functools import cached_property
from pathlib import Path

import msgspec

from tracereader.figures.compiled import graphs_in
from tracereader.figures.gpu_work import GpuWork
from tracereader.figures.summary import Summary
from tracereader.trace.grouped import grouped, totals
from tracereader.trace.kernel_names import KernelName, decode, short
from tracereader.trace.labels import COMPILE_ROWS


class Side(msgspec.Struct, frozen=True, dict=True):
    """One run's step, as a comparison needs it."""

    summary: Summary

    @cached_property
    def name(self) -> str:
        """Return script and tag of a numbered script's trace; else the file's name."""
        stem = Path(self.summary.source.trace).name.removesuffix(".gz").removesuffix(".json")
        return f"{self.summary.source.facts.script} {stem}".strip()

    @cached_property
    def work(self) -> Counter:
        return Counter(one.name for one in self.summary.gpu_work)

    @cached_property
    def times(self) -> Counter:
        """Return the GPU time by name of kernel, copy or memset."""
        return totals((one.name, one.us) for one in self.summary.gpu_work)

    @cached_property
    def work_of(self) -> dict[str, Counter]:
        """Return the names of the GPU work that each op launched, by op; work without an op is left out."""
        names = grouped((one.asked_by, one.name) for one in self.summary.gpu_work if "::" in one.asked_by)
        return {op: Counter(some) for op, some in names.items()}

    @property
    def peak_bytes(self) -> int | None:
        """Return the peak memory of the run, as its script stored it, or by the profiler's own events."""
        return self.summary.source.facts.peak_bytes or self.summary.source.peak_bytes

    @cached_property
    def ops(self) -> Counter:
        """Return the ops by name. The names of torch.compile's rows have no hash and no number."""
        return totals(
            (next((row for row in COMPILE_ROWS if name.startswith(row)), name), op.calls)
            for name, op in self.summary.cpu.ops.items()
        )

    @cached_property
    def graphs(self) -> list[str]:
        """Return the hashes of the compiled graphs that the step calls."""
        return graphs_in(call.name for call in self.summary.cpu.chain)

    @cached_property
    def says(self) -> dict[str, KernelName]:
        """Return the decoded name of each name of GPU work, by its longest activity."""
        return {one.name: one.says for one in reversed(sorted(self.summary.gpu_work, key=lambda one: -one.us))}

    @cached_property
    def parts(self) -> Counter:
        """Return the number of GPU activities by a short description of each."""
        return Counter(map(_part, self.summary.gpu_work))


def _part(one: GpuWork) -> str:
    """Return the activity's operation in a word or two, if its name gives it."""
    if one.kind != "kernel":
        return one.kind
    if one.family == "GEMM":
        return f"GEMM on {one.name_says['on']}" if "on" in one.name_says else "GEMM"
    if one.family == "attention":
        return f"attention {one.name_says.get('does', '')}".strip() + f" ({one.maker})"
    says = decode(one.name)
    does = says.parts.get("does") or short(one.name)
    return (f"{says.family} {does}" if does in ("forward", "backward") else does).replace(", ", " ")
