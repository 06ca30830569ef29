"""The figures of both articles: how to see each in your own trace, and the lines that show it.

docs/make.py makes two tables of docs/articles.md from this list. tests/test_docs.py runs every command on the reference
traces of both machines.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """title: what the article shows. run: a numbered script with its flags; trace: the reference of that run.

    look: the flags after `read-trace TRACE`. see: the answer, in a sentence. lines: an expression for the printed lines
    that show it. on_cpu: the same for a run on the CPU, or the reason why such a run shows nothing.
    """

    number: str
    title: str
    run: str
    trace: str
    look: str
    see: str
    lines: str
    on_cpu: str | None = None


# The heads of a report's tables.
HEADS = r"(?:profiler table|step, in µs|GPU work of one step|before the GPU work|(?:ops' own, )?\d+ steps, µs).*"

RUN_64, TRACE_64 = "01_matmul_add.py --size 64", "01_matmul_add/64_bf16_cold_eager"
FIRST_STEPS = "--wait 0 --schedule-warmup 0"
RUN_64_ALL, TRACE_64_ALL = f"{RUN_64} {FIRST_STEPS}", f"{TRACE_64}_wait0_schedwarmup0"
COMPILED = "01_matmul_add.py --size 4096 --warmup --compile", "01_matmul_add/4096_bf16_warm_compile"
MLP = "03_simple_mlp/64x128x768x3072_bf16"
GPU_ONLY = "only a GPU's trace has it: "

PART_1 = (
    Figure("1", "the profiler table, 64 x 64", RUN_64, TRACE_64, "--only table",
           "The last row: far more CPU time than GPU time, so the GPU waits for the CPU.",
           r"self times of all.*|matmul_add .*"),
    Figure("2", "the profiler table, 4096 x 4096", "01_matmul_add.py --size 4096",
           "01_matmul_add/4096_bf16_cold_eager", "--only table",
           "The GPU's sum is near the CPU's, and one kernel takes nearly all of it.",
           r"self times of all.*|aten::mm .*|nvjet.*"),
    Figure("3", "the trace, 64 x 64", RUN_64, TRACE_64, "--only short,lanes",
           "Width is time. The GPU's lane is nearly empty.",
           r"(?:Overhead-bound|CPU only|Compute-bound|Memory-bound|Overhead).*"),
    Figure("4", "the two lanes and the recorded steps", RUN_64, TRACE_64, "--only steps",
           "wait and warm-up skip two steps, so the first recorded one is #2.", r".* 3 steps of .*|#2 .*"),
    Figure("5", "the first step is wider", RUN_64, TRACE_64, "--only steps",
           "The line with a star says by how much, and why.", r"#2 .*|\* #2.*"),
    Figure("6", "the gap before the first op", RUN_64, TRACE_64, "--only predictions",
           "Whether the gap explains the wide step.",
           r".*are in the gap.*"),
    Figure("7", "warmed up, the steps are alike", "01_matmul_add.py --size 64 --warmup",
           "01_matmul_add/64_bf16_warm_eager", "--only predictions",
           "On the H200 they are not. The cause is the pause before the first recorded step and not first use: "
           "[the experiment](01_matmul_add.md#why-is-the-first-recorded-step-so-wide).", r".*the longest is.*"),
    Figure("8", "the offset between the lanes", RUN_64_ALL, TRACE_64_ALL, "--step 0 --only starts",
           "`wait` is this offset for each kernel, and its parts add up to it.",
           r"nvjet.*|vectorized.*|own, before.*", GPU_ONLY + "there is one lane"),
    Figure("9", "an Activity Buffer Request", RUN_64_ALL, TRACE_64_ALL, "--only predictions",
           "The profiler allocates memory for GPU records once, before the first kernel.",
           r".*before the first kernel.*", GPU_ONLY + "there are no GPU records"),
    Figure("10", "a gap between matmul and add", RUN_64_ALL, TRACE_64_ALL, "--step 0 --only starts",
           "In the gap the launching thread is in aten::add and its launch, on their first call, and in no buffer "
           "request.", r"in the gap before vec.*", GPU_ONLY + "the gap is between kernels"),
    Figure("11", "with 20 steps, the gap shows once", f"{RUN_64_ALL} --active 20", f"{TRACE_64_ALL}_active20",
           "--step 1 --only steps,patterns",
           "`span` minus `GPU busy` is the gap of each step.",
           r"#[0-3] .*|.*Activity Buffer Request.*", r"#[0-3] .*"),
    Figure("12", "the chain of dispatch", RUN_64, TRACE_64, "--only chain",
           "aten::matmul calls aten::mm, which launches.",
           r" +(aten::m|cu).*"),
    Figure("13", "a batched product", "01_matmul_add.py --size 64 --batch 8 --warmup",
           "01_matmul_add/64_bf16_warm_eager_batch8", "--only chain",
           "aten::matmul ends in aten::bmm, behind views that move nothing.",
           r" +aten::(matmul|bmm).*"),
    Figure("14", "an occupancy query before the GEMM", RUN_64_ALL, TRACE_64_ALL, "--only predictions",
           "On Hopper only the first GEMM of the process asks.", r".*none in the others",
           GPU_ONLY + "a CPU has no occupancy"),
    Figure("15", "the matmul's footprint", RUN_64, TRACE_64, "--only work,names",
           "Registers, shared memory, grid x block, and what limits the occupancy.",
           r"nvjet.*KB.*|.*GEMM \(.*", GPU_ONLY + "registers and shared memory"),
    Figure("16", "the add's footprint", RUN_64, TRACE_64, "--only work,names",
           "A few registers, no shared memory.", r"vectorized.*KB.*|.*pointwise \(.*",
           GPU_ONLY + "registers and shared memory"),
    Figure("17", "one kernel, different times", "01_matmul_add.py --size 4096 --warmup",
           "01_matmul_add/4096_bf16_warm_eager", "--only series",
           "Three steps are too few to say more than that they differ.", r"nvjet.*|vectorized.*|.*too few.*",
           r"aten::m.*|.*too few.*"),
    Figure("18", "the same over 20 steps", f"01_matmul_add.py --size 4096 {FIRST_STEPS} --active 20",
           "01_matmul_add/4096_bf16_cold_eager_wait0_schedwarmup0_active20", "--only series",
           "One bar per step; median, mean, range and ramp.",
           r"nvjet.*|vectorized.*", r"aten::mm .*|aten::add .*"),
    Figure("19", "torch.compile's rows", *COMPILED, "--only chain",
           "Dynamo checks its guards, AOTAutograd wraps, Inductor's code runs in ## Call.",
           r" +(TorchDynamo|Torch-C|Pregraph|AOT|## Call).*"),
    Figure("20", "one aten::addmm", *COMPILED, "--only chain", "Product and add became one op.", r" +aten::addmm.*"),
    Figure("21", "and still two GPU activities", *COMPILED, "--only work,chain",
           "The bias is copied into the output, and the GEMM adds to it.", r"Memcpy.*|nvjet.*", r" +aten::copy_.*"),
)  # fmt: skip

LINEAR = "02_linear.py", "02_linear/1024x32x64_bf16_cold_eager"
LINEAR_WARM = "02_linear.py --warmup", "02_linear/1024x32x64_bf16_warm_eager"
MLP_WARM = "03_simple_mlp.py --warmup", f"{MLP}_warm_eager"
MLP_COMPILED = "03_simple_mlp.py --warmup --compile", f"{MLP}_warm_compile"
LIGER = "03_kernels_mlp.py --warmup", "03_kernels_mlp/64x128x768x3072_bf16_warm_eager"
NEEDS_TRITON = "Liger's kernel needs a GPU"

PART_2 = (
    Figure("1", "nn.Linear", *LINEAR, "--only short,chain", "One step of one layer: linear, t, addmm.",
           r" +aten::(linear|t|addmm) .*"),
    Figure("2", "the transpose's row", *LINEAR, "--only chain",
           "aten::t swaps two strides on the CPU; [a demonstration](02_linear.md#a-transpose-that-moves-nothing).",
           r" +aten::t .*"),
    Figure("3", "no aten::add", *LINEAR, "--only predictions", "The GEMM's epilogue adds the bias.",
           r".*and no aten::add.*|.*its name says bias.*"),
    Figure("4", "the eager chain", *LINEAR_WARM, "--only chain", "linear, t, transpose, as_strided, addmm.",
           r" +aten::.*"),
    Figure("5", "the compiled chain", "02_linear.py --warmup --compile", "02_linear/1024x32x64_bf16_warm_compile",
           "--only chain", "addmm is called directly, because compilation resolved the strides.",
           r" +aten::addmm.*"),
    Figure("6", "GLU variants: why this MLP", *MLP_WARM, "--only predictions",
           "The article cites a paper. The script predicts what the layer consists of.",
           r".*3 aten::linear.*|.*5 kernels.*"),
    Figure("7", "the MLP's trace", *MLP_WARM, "--only work,chain",
           "Five kernels: gate_proj, up_proj, gelu, mul, down_proj.", r"nvjet.*|vectorized.*",
           r" +.*aten::(linear|gelu|mul) .*"),
    Figure("8", "occupancy queries of the linears", "03_simple_mlp.py", f"{MLP}_cold_eager", "--only predictions",
           "On Hopper none in the recorded steps: asked once a process (part 1, figure 14).", r".*none in steps.*",
           GPU_ONLY + "a CPU has no occupancy"),
    Figure("9", "ops that launch nothing", *MLP_WARM, "--only table",
           "Views have calls and CPU time, and 0.0 on the GPU.",
           r"aten::(t|transpose|reshape|view|as_strided|_unsafe_view) .*"),
    Figure("10", "the compiled MLP", *MLP_COMPILED, "--only chain",
           "Three aten::mm without wrappers, and one kernel that Inductor wrote between them.",
           r" +(aten::mm|triton_poi|graph_0_cpp).*"),
    Figure("11", "the fused Triton kernel", *MLP_COMPILED, "--only names,chain",
           "The name says what was fused.",
           r" +triton_poi\S+$|.*fuses.*", r" +graph_0_cpp.*"),
    Figure("12", "Liger's MLP", *LIGER, "--only work", "The same fusion by hand, between the same GEMMs.",
           r"nvjet.*|_geglu.*", NEEDS_TRITON),
    Figure("13", "what a compiled run does before the first GEMM", *MLP_COMPILED, "--only chain",
           "Lookup, region and prologue: every call pays for them.", r" +(TorchDynamo|Torch-C|Pregraph|AOT|## Call).*"),
    Figure("14", "and Liger's does not", *LIGER, "--only predictions", "None of those rows.", r".*such rows.*",
           NEEDS_TRITON),
)  # fmt: skip

# The tables of the articles.
TABLES = (
    ("part 2, the table per op", "`uv run 03_simple_mlp.py --warmup`", "`read-trace TRACE --only work`",
     "op and layer, kernel, time, launch and footprint of each GPU activity"),
    ("part 2, why two kinds of GEMM", "`uv run 03_simple_mlp.py --warmup --record-shapes`",
     "`read-trace TRACE --only names`", "M · K · N, FLOPs and rate of each product"),
    ("both closing tables", "each setup in turn", "`read-trace A B C …`, and with `--previous`",
     "each setup against the first one or against the previous one: what changed, what stayed the same"),
)  # fmt: skip
