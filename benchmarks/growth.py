"""How the time of read-trace grows with its input, for inputs made to be slow to read.

    uv run python benchmarks/growth.py [LARGEST]

Each kind of trace at a quarter, half and all of LARGEST (100,000) of what it is made of: seconds of
the whole process, and how many times as long the doubled one takes. The bar: 2.3 a doubling.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def op(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1, **args) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def launched(n: int, name: str, ts: float) -> Iterator[dict]:
    """One launch and its kernel."""
    yield op("cudaLaunchKernel", ts, 0.5, "cuda_runtime", correlation=n)
    yield op(name, ts + 1, 0.5, "kernel", 7, correlation=n, device=0)


def step(number: int, ts: float, dur: float) -> dict:
    return op(f"ProfilerStep#{number}", ts, dur, "user_annotation")


def long_name(n: int) -> list[dict]:
    return [op("aten::mm", 1, 9), *launched(1, "at::native::" + "elementwise_kernel<" * (n // 19), 2)]


def long_triton_name(n: int) -> list[dict]:
    return [op("aten::mm", 1, 9), *launched(1, "triton_poi_fused_" + "add_mul_" * (n // 8) + "0", 2)]


def new_names(n: int) -> list[dict]:
    events = [op("aten::mm", 1, 2 * n)]
    for k in range(n):
        events += launched(k, f"ampere_bf16_s16816gemm_bf16_{os.getpid()}{k}x128_ldg8_stages_64x3_nn", 2 + 2 * k)
    return events


def many_launches(n: int) -> list[dict]:
    events = [step(0, 0, 3 * n + 10), op("label", 1, 3 * n + 5, "user_annotation")]
    for k in range(n):
        events += launched(k, "k", 2 + 2 * k)
    return events


def deep(name: str, on_gpu: bool = True) -> Callable[[int], list[dict]]:
    def chain(n: int) -> list[dict]:
        return [op(name, 1 + k, 4 * n - 2 * k) for k in range(n)] + list(launched(1, "k", 1.5 * n) if on_gpu else ())

    return chain


def over_one_product(n: int) -> list[dict]:
    return [op("aten::add", 1 + k, 4 * n - 2 * k) for k in range(n)] + [op("aten::mm", 2 * n, 1)]


def nodes_below(n: int) -> list[dict]:
    nested = [op("aten::add", 1 + k, 4 * n - 2 * k) for k in range(n // 2)]
    node = "autograd::engine::evaluate_function: AddBackward0"
    return nested + [op(node, 2 * n + k / n, 0.5 / n) for k in range(n // 2)] + list(launched(1, "k", 1.5 * n))


def frames(n: int) -> list[dict]:
    nested = [op(f"f{k % 50}", 1 + k, 4 * n - 2 * k, "python_function") for k in range(n // 2)]
    return nested + [one for k in range(n // 2) for one in launched(k, "k", 1.5 * n + k / 100)]


def late_kernels(n: int) -> list[dict]:
    events = []
    for k in range(n):
        events += [step(k, 10 * k, 9), op("aten::mm", 10 * k + 1, 5)]
        events += [op("cudaLaunchKernel", 10 * k + 2, 1, "cuda_runtime", correlation=k)]
        events += [op("k", 20 * n + k, 0.5, "kernel", 7, correlation=k, device=0)]
    return events


def tokens(n: int) -> list[dict]:
    """Attention of one query, each to one key more."""
    found = []
    for k in range(n):
        sizes = [[1, 1, 1, 8], [1, 1, 9 + k, 8], [1, 1, 9 + k, 8]]
        found += [op("aten::scaled_dot_product_attention", 10 * k + 1, 5, **{"Input Dims": sizes})]
        found += launched(k + 1, "attention", 10 * k + 2)
    return found


def wide_steps(n: int) -> list[dict]:
    each = int(n**0.5)
    events = []
    for k in range(each):
        dur = 9 * each if k % 2 else 3 * each
        events += [step(k, 20 * each * k, dur)]
        events += [op(f"op{i}", 20 * each * k + 2 * i, 1.5) for i in range(min(each, dur // 2))]
    return events


def overheads(n: int) -> list[dict]:
    events = [step(k, 10 * k, 9 if k % 2 else 3) for k in range(n // 2)]
    return events + [op(f"overhead {k % 9}", 10 * k + 1, 1, "overhead", 9) for k in range(n // 2)]


def overheads_in_a_step(n: int) -> list[dict]:
    events = [one for k in range(n // 4) for one in launched(k, "k", 10 * k + 1)]
    return events + [op("Lazy Function Loading", 40 * k, 1, "overhead", 9) for k in range(n // 40)]


def overheads_in_every_wait(n: int) -> list[dict]:
    events = [step(0, 0, 100 * n)]
    for k in range(n // 2):
        events += [op("cudaLaunchKernel", 1 + k, 0.5, "cuda_runtime", correlation=k)]
        events += [op("k", 20 * n + k, 0.5, "kernel", 7, correlation=k, device=0)]
    return events + [op(f"overhead {k % 9}", 2 * n + 10 * k, 1, "overhead", 9) for k in range(n // 2)]


def optimizers(n: int) -> list[dict]:
    """In a trace without steps; of ten slices one is an optimizer's, the others are backward's."""
    events = []
    for k in range(n // 10):
        node = "autograd::engine::evaluate_function: MmBackward0"
        events += [op(node, 100 * k + 2 * i, 1, **{"Sequence number": 9 * k + i}) for i in range(9)]
        events += [op("Optimizer.step#SGD.step", 100 * k + 50, 10, "user_annotation")]
    return events


def nested_optimizers(n: int) -> list[dict]:
    """Annotations of optimizers inside each other, of one name, of two, and each of its own."""
    names = [f"Optimizer.step#{name}.step" for name in ("SGD", "AdamW")]
    events = [step(0, 0, 9 * n)]
    for k in range(n // 2):
        name = f"Optimizer.step#O{k}.step" if k >= n // 4 else names[k > n // 8 and k % 2]
        events += [op(name, 1 + k, 8 * n - 2 * k, "user_annotation")]
        events += [op("aten::_foreach_add_", 2 * n + 2 * k, 1), *launched(k, "k", 2 * n + 2 * k + 0.1)]
    return events


def passes(n: int) -> list[dict]:
    """In a trace without steps; each forward and its backward launch five kernels, and a read of the loss follows."""
    events = []
    for k in range(n // 5):
        at, thread = 100 * k, {"tid": 2}
        events += [op("aten::mm", at, 8), *launched(5 * k, "sgemm", at + 1)]
        events += [op("aten::mse_loss", at + 10, 8), *launched(5 * k + 1, "loss", at + 11)]
        node = "autograd::engine::evaluate_function: "
        events += [op(node + "MseLossBackward0", at + 20, 9, **thread), op("MseLossBackward0", at + 21, 7, **thread)]
        events += [op(node + "MmBackward0", at + 30, 9, **thread), op("MmBackward0", at + 31, 7, **thread)]
        events += [op(node + "torch::autograd::AccumulateGrad", at + 40, 9, **thread)]
        events += [op("aten::add_", at + 41, 7, **thread), op("aten::item", at + 50, 9)]
        for number, (ts, name) in enumerate([(at + 22, "loss"), (at + 32, "sgemm"), (at + 42, "add")], 2):
            call, kernel = launched(5 * k + number, name, ts)
            events += [call | thread, kernel]
        for forward, backward, tie in ((at, at + 31, 2 * k), (at + 10, at + 21, 2 * k + 1)):
            flow = {"cat": "fwdbwd", "name": "fwdbwd", "pid": 1, "id": tie}
            events += [flow | {"ph": "s", "tid": 1, "ts": forward}]
            events += [flow | {"ph": "f", "tid": 2, "ts": backward, "bp": "e"}]
        events.append(op("cudaStreamSynchronize", at + 51, 5, "cuda_runtime"))
    return events


def masks(n: int) -> list[dict]:
    made = ("aten::ones", "aten::tril", "aten::mul", "aten::mul", "aten::mul")
    return [op(made[k % 5], 10 * k, 5) for k in range(n)] + list(launched(1, "k", 10 * n))


def products_in_one_op(n: int) -> list[dict]:
    """Runs of twenty products of slices, parted by an addition, all of them in one op."""
    events, time = [step(0, 0, 10 * n + 20), op("Torch-Compiled Region: 0/0", 1, 10 * n + 10)], 2
    for k in range(n):
        if k % 21 == 20:
            events += [op("aten::add", time, 6), *launched(k, "add", time + 1)]
        else:
            events += [op("aten::select", time, 1), op("aten::mm", time + 2, 6), *launched(k, "sgemm", time + 3)]
        time += 10
    return events


def parts_of_one_op(n: int) -> list[dict]:
    """An LSTM of cuDNN: one op that sets memory and launches a kernel for each time step."""
    events = [op("aten::_cudnn_rnn_backward", 1, 4 * n + 9)]
    for k in range(n):
        events += [op("cudaMemsetAsync", 2 + k, 0.5, "cuda_runtime", correlation=k),
                   op("Memset (Device)", 3 + k, 0.5, "gpu_memset", 7, correlation=k, device=0)]  # fmt: skip
    for k in range(n, 2 * n):
        events += launched(k, "LSTM_elementWise_bp1", 4 + k)
    return events


def uncompiled_flex(n: int) -> list[dict]:
    """Regions of torch.compile in which autograd names flex_attention, with two products and a copy in each."""
    events = [step(0, 0, 90 * n)]
    for k in range(0, n, 9):
        at = 90 * k + 1
        events += [op("Torch-Compiled Region: 0/0", at, 700), op("FlexAttentionAutogradOp", at + 1, 600)]
        for part in range(8):
            name, kernel = ("aten::bmm", "sgemm") if part % 4 == 0 else ("aten::mul", "mul")
            events += [op(name, at + 50 * part + 2, 40), *launched(k + part, kernel, at + 50 * part + 3)]
        events += [op("cudaMemcpyAsync", at + 450, 5, "cuda_runtime", correlation=k + 8)]
        events += [op("Memcpy HtoD", at + 451, 5, "gpu_memcpy", 7, correlation=k + 8, device=0, bytes=8)]
    return events


def nested_flex(n: int) -> list[dict]:
    """Calls of flex_attention inside each other, as no program has them."""
    names = ("Torch-Compiled Region: 0/0", "FlexAttentionAutogradOp", "aten::bmm", "aten::_safe_softmax")
    chain = [op(names[k % 4], k, 4 * n - 2 * k) for k in range(n // 2)]
    return [*chain, *(one for k in range(n // 4) for one in launched(k, "sgemm", n + 3 * k))]


def threads_at_once(n: int) -> list[dict]:
    """Each thread runs one op, all of them at the same time, and launches a kernel."""
    events = [step(0, 0, 4 * n)]
    for k in range(n):
        call, kernel = launched(k, "k", 1.5 + 3 * k)
        events += [op("aten::mm", 1 + k / n, 3 * n, tid=k + 1), call | {"tid": k + 1}, kernel]
    return events


def threads_twice(n: int) -> list[dict]:
    """Each thread pauses once, while all others are at work."""
    events = [step(0, 0, 20 * n), *launched(1, "k", 2)]
    for k in range(n):
        events += [op("aten::mm", 1 + k / n, 100 + k / n, tid=k + 1), op("aten::mm", 1000 + k / n, 100, tid=k + 1)]
    return events


def nested_modules(n: int) -> list[dict]:
    events = [step(0, 0, 4 * n)]
    events += [op(f"nn.Module: M_{k}", 1 + k / 2, 4 * n - k - 2, "python_function") for k in range(n)]
    for k in range(n // 2):
        events += [op("aten::mm", 1 + n / 2 + k, 0.9), *launched(k, "k", 1 + n / 2 + k)]
    return events


def captures(n: int) -> list[dict]:
    """Captures of one launch each, and as many replays that fit all of them."""
    events = []
    for k in range(1, n + 1):
        begins, ends = (f"cudaStream{edge}Capture" for edge in ("Begin", "End"))
        events += [op(begins, 10 * k, 0.5, "cuda_runtime"), op("aten::mm", 10 * k + 1, 5)]
        events += [op("cudaLaunchKernel", 10 * k + 2, 1, "cuda_runtime"), op(ends, 10 * k + 7, 0.5, "cuda_runtime")]
        events += [op("cudaGraphLaunch", 10 * k + 8, 0.3, "cuda_runtime", correlation=k)]
        events += [op("k", 10 * k + 9, 0.3, "kernel", 7, correlation=k, device=0)]
    return events


def nested_labels(n: int) -> list[dict]:
    events = [step(0, 0, 4 * n)]
    events += [op(f"label {k}", 1 + k / 2, 4 * n - k - 2, "user_annotation") for k in range(n)]
    return events + [one for k in range(n // 2) for one in launched(k, "k", 1 + n / 2 + k)]


def overlapping_ops(n: int) -> list[dict]:
    events = [step(0, 0, 4 * n)]
    for k in range(n):
        events += [op(f"aten::op{k % 7}", 1 + k, n + 0.5), *launched(k, "k", 1.1 + k)]
    return events


KINDS = {
    "one long kernel name (characters)": long_name,
    "one long Triton name": long_triton_name,
    "comparing two with all names new": new_names,
    "launches under one label": many_launches,
    "aten::view in aten::view": deep("aten::view"),
    "aten::matmul in aten::matmul": deep("aten::matmul"),
    "aten::linear in aten::linear": deep("aten::linear"),
    "aten::mm in aten::mm": deep("aten::mm", on_gpu=False),
    "aten::add over one aten::mm": over_one_product,
    "backward's nodes below nested ops": nodes_below,
    "Python frames over launches": frames,
    "late kernels in every step": late_kernels,
    "attention to growing keys": tokens,
    "wide steps times names": wide_steps,
    "overheads times steps": overheads,
    "launches times overheads (--json)": overheads_in_a_step,
    "overheads in each wait (--json)": overheads_in_every_wait,
    "backward and optimizers": optimizers,
    "optimizers in optimizers": nested_optimizers,
    "passes of forward and backward": passes,
    "masks made in a trace without steps": masks,
    "runs of equal products in one op": products_in_one_op,
    "memsets and kernels of one op": parts_of_one_op,
    "flex_attention, not compiled": uncompiled_flex,
    "flex_attention in flex_attention": nested_flex,
    "threads at work at once": threads_at_once,
    "threads that pause": threads_twice,
    "modules in modules": nested_modules,
    "captures of equal graphs": captures,
    "annotations in annotations (--json)": nested_labels,
    "ops that overlap (--json)": overlapping_ops,
}


def seconds(events: list[list[dict]], folder: str, *flags: str) -> float:
    files = []
    for number, one in enumerate(events):
        files.append(Path(folder) / f"{number}.json")
        files[-1].write_text(json.dumps({"traceEvents": one}))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        words = [sys.executable, "-m", "tracereader", *files, *flags]
        subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    largest = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    print(f"{'':36}{largest // 4:>9,}{largest // 2:>9,}{largest:>9,}   a doubling")
    with tempfile.TemporaryDirectory() as folder:
        for name, make in KINDS.items():
            times = []
            for n in (largest // 4, largest // 2, largest):
                events = [make(n)]
                if make is new_names:
                    other = json.loads(json.dumps(events[0]).replace("ampere_bf16", "hopper_bf16"))
                    events.append(other)
                times.append(seconds(events, folder, *(["--json=all"] * ("--json" in name))))
            ratios = [after / before for before, after in itertools.pairwise(times)]
            print(f"{name:36}" + "".join(f"{t:7.2f} s" for t in times) + "   " + " ".join(f"x {r:.2f}" for r in ratios))


if __name__ == "__main__":
    main()
