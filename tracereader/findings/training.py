"""Findings about a training step: recomputation, the optimizer's launches, a loader that is too slow."""

from tracereader.findings.finding import Finding, Verdict, counted

# Of a step, waiting for its batch: below that, taking a batch from a queue that is never empty.
MUCH_LOADING = 0.1
# Launches of a for-loop optimizer: with fewer, foreach would save nothing that shows.
MANY_LAUNCHES = 20


def recomputation() -> Finding:
    def judge(summary):
        again = summary.training.recomputed
        if again is None:
            return Verdict(False, "")
        where = f"{again.gpu_us:,.1f} µs of GPU time in {counted(again.pieces, 'piece')}" if again.gpu_us else (
            f"{again.cpu_us:,.1f} µs of CPU time"
        )  # fmt: skip
        return Verdict(True, f"{counted(again.calls, 'forward op')} a step, {where}")

    return Finding("forward ops inside backward", judge)


def optimizer_for_loop() -> Finding:
    def judge(summary):
        loops = [one for one in summary.training.optimizers if one.how == "for-loop" and one.launches >= MANY_LAUNCHES]
        if not loops:
            return Verdict(False, "")
        most = max(loops, key=lambda one: one.launches)
        seen = (
            f"{most.name}: {most.launches:,} launches a step, {most.cpu_us:,.1f} µs of CPU time for {most.gpu_us:,.1f} "
            f"of GPU time; the GPU idle for {most.idle_us:,.1f}"
        )
        return Verdict(True, seen, cost_us=most.idle_us)

    return Finding("an optimizer that launches for each parameter", judge, needs_gpu=True)


def starving() -> Finding:
    def judge(summary):
        waits = summary.training.loading
        if waits is None or waits.share < MUCH_LOADING:
            return Verdict(False, "")
        seen = f"{waits.us / 1e3:,.1f} ms of a step, {waits.share:.0%} of its time"
        if waits.idle_us is None:
            return Verdict(True, seen, cost_us=waits.us)
        idle = waits.idle_us / waits.us if waits.us else 0.0
        return Verdict(idle > 0.5, f"{seen}, the GPU idle for {idle:.0%} of that", cost_us=waits.idle_us)

    return Finding("a step that waits for the DataLoader", judge)
