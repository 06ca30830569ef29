"""Findings about a language model's steps: tokens per second, and the roofline."""

from tracereader.figures import Summary
from tracereader.figures.decoding import Decoding
from tracereader.findings.finding import counted, duration, size, tokens_s

MUCH_READING = 0.2  # if matrix products take this share of a step, their rate of reading weights is reported


def in_words(summary: Summary) -> list[str]:
    """Return sentences on tokens per second and the roofline; none if the run did not store what its step reads."""
    found = summary.llm.decoding
    if found is None:
        return []
    facts = found.facts
    sequences = "one sequence" if facts.batch == 1 else f"{facts.batch:,} sequences"
    lines = [
        f"{facts.phase} of {sequences}: a step of {counted(facts.tokens, 'token')} takes {duration(found.step_us)} on "
        f"the {found.lane} lane, which is {tokens_s(found.tokens_s)} tokens a second with the profiler"
    ]
    busy = summary.chosen.gpu_busy_us
    if found.lane == "CPU" and 0 < busy < found.step_us:
        lines[0] += f"; the GPU work alone would allow {tokens_s(facts.tokens / busy * 1e6)} tokens a second"
    # Prefill multiplies each weight by many tokens, so reading the weights does not limit it.
    if facts.phase == "decode" and found.least_us and found.least_us <= found.step_us:
        lines += [_roof(found), *_products(summary)]
    return lines


def _roof(found: Decoding) -> str:
    """Return the sentence on the roofline: the longer of reading and arithmetic, if the latter is known."""
    facts, least = found.facts, found.least_us
    read = f"reading the weights ({size(facts.weight_bytes)})"
    if facts.cache_bytes:
        read += f" and the cache ({size(facts.cache_bytes)})"
    rate = f"{found.gb_s / 1e3:.1f} TB/s"
    at = f"{rate}, the bandwidth that the run measured" if found.measured else f"the data sheet's {rate}"
    read += f" once takes {duration(found.read_us)} at {at}"
    reached = f"{least / found.step_us:.1%}"
    allows = f"allows {facts.tokens / least * 1e6:,.0f} tokens a second, and the step reaches {reached}"
    if (found.multiply_us or 0.0) <= found.read_us:
        return f"{'reading alone' if found.multiply_us is None else 'the roofline'} {allows} of that: {read}"
    factors = f"2 x {facts.weight_bytes / 2e6:,.1f} M weights x {counted(facts.tokens, 'token')}"
    take = f"take {duration(found.multiply_us)} at the data sheet's {found.tflops:,.0f} TFLOP/s"
    why = f"arithmetic is the limit, because {factors} = {found.flops / 1e9:,.1f} GFLOP {take}"
    return f"the roofline {allows} of that: {why}; {read}"


def _products(summary: Summary) -> list[str]:
    """Return a sentence on how fast matrix products read the weights, if reading limits the step.

    There is none if some of them overlap, because their times do not add up then.
    """
    found, products = summary.llm.decoding, [one for one in summary.gpu_work if one.family == "GEMM"]
    us, read = sum(one.us for one in products), found.facts.weight_bytes
    if found.least_us > found.read_us or not all(one.ran_alone for one in products):
        return []
    if us <= MUCH_READING * found.step_us or read > us * found.gb_s * 1e3:
        return []
    reads = f"{read / us / 1e6:.2f} TB/s, {read / us / 1e3 / found.gb_s:.0%} of that bandwidth"
    return [f"matrix products take {duration(us)} of a step and read the weights at {reads}"]
