"""What a kernel's name says about its work. An unknown name is said to be unknown.

Sources: the naming schemes as seen in traces (claims 16, 22, 24, 32), cuBLAS's and CUTLASS's
<instruction><tile><stages><layout> pattern, Inductor's triton_<kind>_fused_<ops>_<id>, Tensile's
Cijk_ scheme. A letter whose meaning is nowhere documented is left out rather than guessed at.
"""

import functools
import re
from dataclasses import dataclass

UNKNOWN = "unknown"
# Parts that may differ between two kernels doing the same product in the same way.
EPILOGUES = {
    "bz": "beta zero",
    "badd": "beta adds what the output holds",
    "bias": "bias added",
    "relu": "ReLU",
    "gelu": "GELU",
    "splitK": "split K",
}


@dataclass(frozen=True)
class KernelName:
    """family: gemm, pointwise, reduction, copy, attention, convolution, communication, … or unknown.

    parts: what the name says, each under the field's word for it (tile, stages, layout, …).
    """

    family: str
    maker: str
    parts: dict[str, str]

    def __str__(self) -> str:
        if self.family == UNKNOWN:
            return "unknown name"
        said = ", ".join(value if key in ("does", "fuses") else f"{key} {value}" for key, value in self.parts.items())
        return f"{self.family} ({self.maker})" + (f": {said}" if said else "")


@functools.lru_cache(maxsize=100_000)  # a pure function of a name, asked of each piece of work
def decode(name: str) -> KernelName:
    """What the name of a kernel, a copy or a memset says."""
    for pattern, read in READERS:
        if match := pattern.search(name):
            family, maker, parts = read(match, name)
            return KernelName(family, maker, {key: value for key, value in parts.items() if value})
    return KernelName(UNKNOWN, "", {})


def short(name: str, width: int = 40) -> str:
    """The name at most `width` wide: without C++ wrapping, the middle left out."""
    decoded = decode(name)
    if decoded.maker == "ATen":
        core = re.sub(r"<.*", "", re.sub(r"^void |at::native::|\(anonymous namespace\)::", "", name))
        does = decoded.parts.get("does", "")
        name = core if not does or does in core.lower() else f"{core}<{does}>"
    elif match := re.search(r"cutlass_\d+\w+", name):
        name = match[0]
    return cut(re.sub(r"^void ", "", name), width)


def cut(name: str, width: int) -> str:
    """The name at most `width` wide, the middle left out."""
    if len(name) <= width:
        return name
    tail = (width - 1) // 2
    return f"{name[: width - 1 - tail]}…{name[-tail:]}"


def _nvjet(match, name):
    words = match["rest"].split("_")
    parts = {
        "types": {"t": "bf16", "h": "fp16", "s": "fp32"}.get(match["types"][0], "") if match["types"] else "",
        "tile": match["tile"],
        "K block x stages": match["stages"],
        "cluster": match["cluster"],
        "epilogue": ", ".join(EPILOGUES[word] for word in words if word in EPILOGUES),
        "cooperative": next((word for word in words if word.startswith("coop")), ""),
        "layout": words[-1] if re.fullmatch("[NT]{3}", words[-1]) else "",
    }
    return "GEMM", f"cuBLAS nvjet{', sm ' + match['sm'] if match['sm'] else ''}", parts


def _cublas(match, name):
    return "GEMM", f"cuBLAS, {match['arch']}", _mma_parts(match["rest"])


def _cutlass(match, name):
    return "GEMM", f"CUTLASS, sm {match['sm']}", _mma_parts(match["rest"])


def _mma_parts(rest: str) -> dict[str, str]:
    # CUTLASS writes the stages as a second tile.
    tile, stages, *_ = [*re.findall(r"(?<![a-z\d])(\d+x\d+)(?!x)", rest), "", ""]
    kind = re.search(r"(?:^|_)([a-z]*?)(\d*)gemm", rest)
    mma, sums = (kind[2], kind[1]) if kind else ("", "")
    layout = re.search(r"_([nt]{2})(?:_|$)", rest)
    return {
        "types": next((one for one in ("bf16", "fp16", "tf32", "fp8", "f16", "s8") if one in rest), "fp32"),
        "instruction": "x".join(_mma_shape(mma)),
        "sums in": "fp32" if sums.startswith("s") and mma else "",
        "tile": tile,
        "K block x stages": stages,
        "layout": layout[1] if layout else "",
    }


def _mma_shape(digits: str) -> list[str]:
    # 16816 is 16x8x16; 161616 and 884 read the same way.
    return re.findall("16|8|4|32", digits)


def _xmma(match, name):
    tile = re.search(r"tilesize(\d+x\d+)(?:x(\d+))?", name)
    stage = re.search(r"stage(\d+)", name)
    layout = re.search(r"_([nt]{2})_[nt]_", name)
    types = re.search(r"_(bf16|f16|f32|tf32|i8|e4m3)", name)
    return (
        "convolution" if re.search("fprop|dgrad|wgrad", name) else "GEMM",
        f"cuBLAS xmma, sm {match['sm']}",
        {
            "types": {"f16": "fp16", "f32": "fp32"}.get(types[1], types[1]) if types else "",
            "tile": tile[1] if tile else "",
            "K block x stages": f"{tile[2]}x{stage[1]}" if tile and tile[2] and stage else "",
            "layout": layout[1] if layout else "",
        },
    )


def _tensile(match, name):
    tile = re.search(r"_MT(\d+x\d+)x(\d+)", name)
    types = re.search(r"_(BBS|HHS|HSS|SB|BSS|DB)_", name)
    return (
        "GEMM",
        "rocBLAS/hipBLASLt Tensile",
        {
            "types": {"B": "bf16", "H": "fp16", "S": "fp32", "D": "fp64"}[types[1][0]] if types else "",
            "tile": tile[1] if tile else "",
            "K block": tile[2] if tile else "",
            "indices": f"A {match['a']}, B {match['b']}",
        },
    )


# Ops whose own names hold underscores; any other word of a fused name is an op by itself.
COMPOUND_OPS = (
    "_unsafe_view", "_to_copy", "_softmax", "_log_softmax", "_native_batch_norm_legit", "native_layer_norm",
    "native_dropout", "layer_norm", "rms_norm", "index_select", "masked_fill", "slice_scatter", "nll_loss_forward",
    "_scaled_dot_product_flash_attention", "convert_element_type", "prims_convert_element_type",
)  # fmt: skip


def _inductor(match, name):
    ops = re.findall("|".join([*COMPOUND_OPS, r"[a-z\d]+"]), match["ops"])
    family = {"poi": "pointwise", "red": "reduction", "per": "reduction", "tem": "GEMM"}.get(match["kind"], "foreach")
    if family == "GEMM" and not re.search("mm|conv|linear", match["ops"]):
        family = "template"
    kind = "persistent" if match["kind"] == "per" else "template" if match["kind"] == "tem" else ""
    return family, "Inductor, Triton", {"kind": kind, "fuses": "fuses " + ", ".join(ops)}


def _inductor_template(match, name):
    return "GEMM", "Inductor, Triton", {"kind": "template", "does": match["op"]}


WRAPPERS = {
    "BinaryFunctor", "UnaryOpFunctor", "AUnaryFunctor", "BUnaryFunctor", "UnaryFunctor", "TensorListMetadata",
}  # fmt: skip


def _functor(name: str) -> str:
    """The operation inside an ATen kernel: CUDAFunctor_add is add, GeluCUDAKernelImpl is gelu."""
    found = re.findall(r"CUDAFunctor(?:OnSelf|OnOther)?_(\w+)|(\w+?)_kernel_(?:cuda|impl)|"
                       r"(\w+?)(?:CUDAKernelImpl|KernelImpl|Functor|Ops)\b", name)  # fmt: skip
    words = [next(part for part in parts if part) for parts in found]
    words = [word for word in words if f"{word}Functor" not in WRAPPERS and word not in ("gpu", "Reduce")]
    if not words and "Copy<" in name:
        return "copy"
    return words[-1].lower().removesuffix("_nocast") if words else ""


def _aten_elementwise(match, name):
    return "pointwise", "ATen", {"does": _functor(name), "vector": match["width"] if match["vectorized"] else ""}


def _aten(family: str):
    return lambda match, name: (family, "ATen", {"does": _functor(name)})


def _aten_other(match, name):
    return "other", "ATen", {"does": match["what"].lower()}


def _attention(maker: str):
    def read(match, name):
        backward = re.search("bwd|backward|bprop|cutlassB", name)
        return "attention", maker, {"does": "backward" if backward else "forward"}

    return read


def _nccl(match, name):
    words = match["rest"].split("_")
    return "communication", "NCCL", {"does": words[0], "details": " ".join(words[1:])}


def _hand_triton(match, name):
    maker = "Liger, Triton" if re.match(LIGER, name) else "Triton, by hand"
    return "pointwise" if "glu" in name else "other", maker, {"does": match["what"].replace("_", " ")}


LIGER = r"_(?:geglu|swiglu|rms_norm|layer_norm|group_norm|triton_rope|fused_add_rms_norm)\w*_(?:for|back)ward_kernel"

# First match wins: from the most particular to the general.
READERS = tuple(
    (re.compile(pattern), reader)
    for pattern, reader in (
        (r"^nvjet_(?:sm(?P<sm>\d+)_)?(?P<types>[a-z]+)_(?P<tile>\d+x\d+)_(?P<stages>\d+x\d+)_(?P<cluster>\d+x\d+)_"
         r"(?P<rest>\w+)", _nvjet),
        (r"cudnn\w*sdpa", _attention("cuDNN")),
        (r"flash_(?:fwd|bwd)|flash::|FlashAttn", _attention("flash attention")),
        (r"fmha_cutlass", _attention("memory-efficient, CUTLASS")),
        (r"sm(?P<sm>\d+)_xmma_", _xmma),
        (r"cutlass_(?P<sm>\d+)_(?P<rest>\w*gemm\w*)", _cutlass),
        (r"(?:^|void )(?P<arch>volta|turing|ampere|ada|hopper|maxwell|pascal)_(?P<rest>\w*gemm\w*)", _cublas),
        (r"^Cijk_(?P<a>A[a-z]+)_(?P<b>B[a-z]+)_", _tensile),
        (r"^nccl(?:Dev)?Kernel_(?P<rest>\w+)", _nccl),
        (r"^triton_(?P<kind>poi|red|per|tem|for)_fused_(?P<ops>\w+?)_\d+$", _inductor),
        (r"^triton_(?P<op>mm|bmm|addmm|convolution)_\d+$", _inductor_template),
        (r"^_(?P<what>\w+)_kernel$", _hand_triton),
        (r"multi_tensor_apply_kernel", _aten("foreach")),
        (r"(?P<vectorized>vectorized)?_?elementwise_kernel(?:_manual_unroll)?<(?P<width>\d+)?", _aten_elementwise),
        (r"at::native::(?:\(anonymous namespace\)::)?reduce_kernel", _aten("reduction")),
        (r"at::native::.*?(?P<what>[Ss]oft[Mm]ax\w*|layer_norm\w*|CatArrayBatchedCopy\w*|index\w+|distribution\w+)",
         _aten_other),
        (r"splitK(?:reduce)?_?[Kk]ernel|splitKreduce", lambda m, n: ("reduction", "cuBLAS", {"does": "adds the parts "
                                                                                            "of a split-K GEMM"})),
        (r"(?:^|void |::)gemv\w*|gemmSN\w*|gemmk1_kernel|dot_kernel", lambda m, n: ("GEMM", "cuBLAS",
                                                                                   {"does": "vector or thin matrix"})),
        (r"cutlass::|cutlass3x_", lambda m, n: ("GEMM" if "gemm" in n.lower() else "other", "CUTLASS", {})),
        (r"implicit_convolve|convolve_|cudnn::|cudnn_", lambda m, n: ("convolution" if "conv" in n else "other",
                                                                      "cuDNN", {})),
        (r"^Memcpy (?P<way>\w+)", lambda m, n: ("copy", "driver", {"does": COPIES.get(m["way"], m["way"])})),
        (r"^memcpy\d+", lambda m, n: ("copy", "driver, inside a CUDA graph", {})),
        (r"^Memset", lambda m, n: ("memset", "driver", {})),
    )
)  # fmt: skip
COPIES = {
    "DtoD": "within the GPU's memory",
    "HtoD": "from the CPU's memory",
    "DtoH": "to the CPU's memory",
    "PtoP": "between GPUs",
}
