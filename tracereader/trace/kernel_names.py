"""What a kernel's name says about its work. An unknown name stays unknown.

Sources: the naming schemes as seen in traces (claims 16, 22, 24, 32), the names inside PyTorch's, cuBLAS's, cuDNN's
and NCCL's own libraries, CUTLASS's <instruction><tile><stages><layout> pattern, Inductor's
triton_<kind>_fused_<ops>_<id>, Tensile's Cijk_ scheme, flash-attention's kernel_traits.h and
flash_fwd_launch_template.h, ATen's PersistentSoftmax.cuh and ScatterGatherKernel.cu (the order of template
arguments). Letters and numbers without a documented meaning are left out.

The first pattern of READERS that fits reads a name that gives details. Two tables read all other names: MAKERS (the
library, by namespace or prefix) and JOBS (the operation, by a word of the function's name). Only the first LOOKED_AT
characters count, because template arguments can make a name tens of kB long.
"""

import functools
import re

import msgspec

from tracereader.trace.types import WRITTEN as TYPES

UNKNOWN = "unknown"
LOOKED_AT = 2_000
# All families.
FAMILIES = (
    "GEMM", "attention", "convolution", "normalization", "reduction", "pointwise", "copy", "memset", "communication",
    "optimizer", "embedding", "sort and scan", "other", UNKNOWN,
)  # fmt: skip
# Parts that may differ between two kernels that compute the same product in the same way.
EPILOGUES = {
    "bz": "beta zero", "badd": "beta adds what the output holds", "bias": "bias added", "relu": "ReLU", "gelu": "GELU",
    "drelu": "ReLU's gradient", "dgelu": "GELU's gradient", "bgrada": "gradient of the bias",
    "bgradb": "gradient of the bias", "splitK": "split K",
}  # fmt: skip


class KernelName(msgspec.Struct, frozen=True):
    """family: one of FAMILIES. `other`: the maker is known, but the job is none of the families or not said.

    pointwise: each output element by itself. copy: elements moved, nothing computed (a driver's copy, a cast,
    concatenation, a gather or scatter, another layout). reduction: softmax, loss and
    pooling too. parts: what the name says, each under the field's word for it (tile, stages, layout, …).
    """

    family: str
    maker: str
    parts: dict[str, str]

    def __str__(self) -> str:
        if self.family == UNKNOWN:
            return "unknown name"
        said = ", ".join(value if key in ("does", "fuses") else f"{key} {value}" for key, value in self.parts.items())
        maker = f" ({self.maker})" if self.maker else ""
        return f"{self.family}{maker}" + (f": {said}" if said else "")

    @property
    def multiplies(self) -> bool:
        """Return whether the kernel is a matrix product itself, and not a helper that a library runs beside one."""
        return self.family == "GEMM" and self.parts.get("does") != EPILOGUE


@functools.lru_cache(maxsize=500_000)  # a pure function of a name, asked of each GPU activity
def decode(name: str) -> KernelName:
    """Return what the name of a kernel, a copy or a memset says."""
    text, own = _plain(name)
    for pattern, read in READERS:
        if match := re.search(pattern, text):
            family, maker, parts = read(match, text)
            return KernelName(family, maker, {key: value for key, value in parts.items() if value})
    maker = next((maker for pattern, maker in MAKERS if re.search(pattern, text)), "")
    family, does = job_of(own) or ("other", "")
    if not maker and family != "other" and (own != text or HAND_WRITTEN.search(own)):
        maker = "by hand" if own != text else "Triton, by hand"
    if not maker:
        return KernelName(UNKNOWN, "", {})
    if family == "attention" and not does:
        does = _attends(own)
    return KernelName(family, maker, {"does": does or _words(own)})


def job_of(own: str) -> tuple[str, str] | None:
    """Return the family and the operation of a function of this name; None if no word of it is known."""
    return next(((family, does) for pattern, family, does in JOBS if re.search(pattern, own, re.IGNORECASE)), None)


def short(name: str, width: int = 40) -> str:
    """Return the name in at most `width` columns, without C++ wrapping and with the middle left out; see labels()."""
    return cut(_label(name), width)


def labels(names, width: int = 40, shorten=short) -> dict[str, str]:
    """A short name for each of a table's names, no two the same: a second one of the same kind is numbered.

    shorten: of a name and a width, what is shown of it.
    """
    found: dict[str, str] = {}
    taken: set[str] = set()
    numbers: dict[str, int] = {}  # the last number given to each name
    for name in dict.fromkeys(names):
        label = plain = shorten(name, width)
        number = numbers.get(plain, 1)
        while label in taken:
            number += 1
            label = f"{shorten(name, max(1, width - len(str(number)) - 2))} #{number}"
        numbers[plain] = number
        taken.add(label)
        found[name] = label
    return found


def cut(name: str, width: int) -> str:
    """Return the name in at most `width` columns, with the middle left out."""
    if len(name) <= width:
        return name
    tail = (width - 1) // 2
    return f"{name[: width - 1 - tail]}…{name[-tail:]}" if tail else name[: width - 1] + "…"


# Functions that only run their template argument. That argument names the operation.
WRAPPER = re.compile(
    r"^(?:cutlass\w*::(?:device_kernel|Kernel2?)|ck_tile::kentry\w*|rocprim::.{0,60}trampoline_kernel|thrust::|DSL|kernel$|\w*::_kernel_agent)"
)
# nsys' prefix of a template's number, and wrapping without information.
NOISE = re.compile(
    r"\((?:unsigned )?(?:int|long|bool|char|short)\)(?=-?\d)|\(anonymous namespace\)::|<unnamed>::|_GLOBAL__N_1::"
    r"| ?\[clone [^\]]{0,30}\]|\.kd$"
)
RETURNS = re.compile(r"^(?:void|std::enable_if<.{0,120}?>::type) ")


@functools.lru_cache(maxsize=500_000)
def _plain(name: str) -> tuple[str, str]:
    """Return the start of the name without its wrapping, and the function's name without template and parameters."""
    text = name[:LOOKED_AT]
    if mangled := re.search(r"_Z(?=\d|N\d|N12_GLOBAL)", text[:200]):
        text = _unmangled(text[mangled.end() :].removeprefix("N"))
    text = RETURNS.sub("", NOISE.sub("", text))
    own = re.match(r"[^<(\[]*", text)[0].strip()
    return text, text[:300] if WRAPPER.search(own) else own


def _unmangled(rest: str) -> str:
    """Unmangle a name: 5aiter14fmha_fwd_hd128… -> aiter::fmha_fwd_hd128, with the rest as its template."""
    path = []
    while (length := re.match(r"\d{1,3}", rest)) and (size := int(length[0])):
        word, rest = rest[length.end() :][:size], rest[length.end() + size :]
        path.append(word)
    return "::".join(path) + (f"<{rest}" if rest.startswith("I") else "")


# Parts that (nearly) all names of one kind share. They are left out first.
LONG_WINDED = re.compile(
    r"^cudnn_generated_(?:fort_native_)?|_cga1x1x1_kernel0_0$|_align[ac]\d|tilesize|(?:_execute)?_kernel__5x_cu\w+$"
)


@functools.lru_cache(maxsize=500_000)
def _label(name: str) -> str:
    said = decode(name)
    if said.family == UNKNOWN or said.maker.startswith("driver"):
        return re.sub(r"^void ", "", name)
    text, own = _plain(name)
    if match := re.search(r"cutlass_\d+\w+", text):
        return match[0]
    if match := re.match(r"((?:Custom_)?Cijk_A[a-z]+_B[a-z]+_\w+?)_\w*?_(MT\d+x\d+x\d+(?:_MI\d+x\d+x\d+)?)", text):
        return f"{match[1]}…{match[2]}"  # a Tensile solution's parameters; the tile is the most informative one
    if said.maker == "ATen":
        own = re.sub(r"^.*::", "", own)
        does = said.parts.get("does", "")
        if all(word in own.lower() for word in re.findall(r"[a-z\d]+", does)):
            does = ""
        scalar = "scalar" if "other operand" in said.parts else ""
        types = said.parts.get("types") or (_types(text, text.find("<")) if "<" in text else "")
        says = [word for word in (does, scalar, types, said.parts.get("vector", "")) if word]
        return own + (f"<{', '.join(says)}>" if says else "")
    if "<" not in text and "(" not in text:
        return LONG_WINDED.sub("", text) if len(name) <= LOOKED_AT else name
    if match := re.match(CUTLASS_TEMPLATE, text):
        return f"{match['name']}<{', '.join(said.parts.values())}>"
    text = re.sub(r"^cutlass\w*::device_kernel<(?:[\w:]*enable_\w+<)?", "", text)
    # The name ends with the template, because the parameters repeat it.
    depth = 0
    for at, char in enumerate(text):
        depth += (char == "<") - (char == ">")
        if char == "(" and not depth:
            text = text[:at]
            break
    return re.sub(r"\b(?:[a-zA-Z_]\w*::)+", "", text)


# --- names that give details ----------------------------------------------------------------------------------------


def _part(pattern: str | re.Pattern, text: str, form: str = "{}") -> str:
    """Return what the groups of the first match hold, in this form; "" without a match."""
    found = re.search(pattern, text)
    return form.format(*found.groups()) if found else ""


def _word(words, pattern: str) -> str:
    """Return the first of the words that has this form; "" without one."""
    return next((word for word in words if re.fullmatch(pattern, word)), "")


def _is_true(flag: str) -> bool:
    """Return whether a template's argument is true, as C++ or nsys writes it."""
    return flag in ("true", "1")


def _nvjet(match, text):
    words = match["rest"].split("_")
    parts = {
        "types": {"t": "bf16", "h": "fp16", "s": "fp32"}.get(match["types"][0], "") if match["types"] else "",
        "tile": match["tile"],
        "K block x stages": match["stages"],
        "cluster": match["cluster"],
        "epilogue": _epilogue(match["rest"]),
        "cooperative": _word(words, "coop.*"),
        "layout": _word(words[-1:], "[NT]{3}"),
    }
    return "GEMM", f"cuBLAS nvjet{', sm ' + match['sm'] if match['sm'] else ''}", parts


def _epilogue(rest: str) -> str:
    return ", ".join(EPILOGUES[word] for word in rest.split("_") if word in EPILOGUES)


def _product(maker: str):
    return lambda match, text: ("GEMM", f"{maker} {match['sm']}", _mma_parts(match["rest"]))


def _cutlass3x(match, text):
    rest = match["rest"]
    tile = r"(?<![a-z\d])(\d+x\d+)x(\d+)(?=_)"
    inputs = _part(r"gemm_(?:[a-z_]*?_)??([a-z]+\d+\w*?)_", rest)
    return "convolution" if re.search(CONVOLVES, rest) else "GEMM", f"CUTLASS 3, sm {match['sm']}", {
        "types": SHORT_TYPES.get(inputs, inputs),
        "on": CUDA_CORES if rest.startswith("simt_sgemm") else "",
        "instruction": _part(r"_[a-z](\d+x\d+x\d+)", rest),
        "tile": _part(tile, rest),
        "K block": _part(tile, rest, "{1}"),
        "epilogue": _epilogue(rest),
        "layout": _part(r"_([nt]{3})(?:_|$)", rest),
    }  # fmt: skip


# CUTLASS's own template of a product, as PyTorch's grouped and scaled products instantiate it.
CUTLASS_TEMPLATE = r"^cutlass::device_kernel<.{0,120}?(?P<name>GemmUniversal)[I<]"


def _cutlass_template(match, text):
    # GemmUniversal<problem's shape, mainloop with tiles and MMA_64x256x16_F32BF16BF16_SS, …>, mangled or not
    mma = r"MMA_(\d+x\d+x\d+)_[FS]\d\d(BF16|F16|TF32|E[45]M\d|S8)"
    types = _part(mma, text, "{1}").lower()
    return "GEMM", "CUTLASS 3" + _part(r"MainloopSm(\d+)", text, ", sm {}"), {
        "does": "grouped" if "GroupProblemShape" in text else "",
        "types": SHORT_TYPES.get(types, types),
        "instruction": _part(mma, text),
    }  # fmt: skip


# An fp32 product without TF32 (ffma, simt, sgemm without an instruction's shape) does not use tensor cores.
CUDA_CORES = "CUDA cores"
# The letters before gemm give the types: d and z are fp64, c and z complex, h fp16, i int8.
LETTERS = {"d": "fp64", "z": "complex fp64", "c": "complex fp32", "gc": "complex fp32", "h": "fp16", "i": "int8"}


def _mma_parts(rest: str) -> dict[str, str]:
    # CUTLASS writes the stages as a second tile.
    tile, stages, *_ = [*re.findall(r"(?<![a-z\d])(\d+x\d+)(?!x)", rest), "", ""]
    kind = re.search(r"(?:^|_)(gc|[a-z]?)(\d*)(?:tf32|bf16|f16|fast\w{0,8})?gemm", rest)
    mma, sums = (kind[2], kind[1]) if kind else ("", "")
    types = next((one for one in ("bf16", "fp16", "tf32", "fp8", "f16", "s8") if one in rest), "")
    types = {"f16": "fp16", "s8": "int8", "tf32": "TF32"}.get(types, types) or LETTERS.get(sums, "fp32")
    # 16x8x8 on inputs of 4 bytes is TF32's instruction: it keeps 10 of fp32's 23 bits.
    if mma == "1688" and types.endswith("fp32"):
        types = types.replace("fp32", "TF32")
    return {
        "types": types,
        "on": CUDA_CORES if types == "fp32" and not mma and re.search(r"simt|(?:^|_)sgemm|ffma", rest) else "",
        "instruction": "x".join(re.findall("16|8|4|32", mma)),  # 16816 is 16x8x16; so are 161616 and 884 read
        "sums in": "fp32" if sums.startswith("s") and mma else "",
        "tile": tile,
        "K block x stages": stages,
        "layout": _part(r"_([ntc]{2})(?:_|$)", rest),
    }


SHORT_TYPES = {
    "f16": "fp16", "f32": "fp32", "f64": "fp64", "tf32": "TF32", "i8": "int8", "s8": "int8", "e4m3": "fp8",
    "e5m2": "fp8", "f8": "fp8", "cf32": "complex fp32", "cf64": "complex fp64",
}  # fmt: skip


def _xmma(match, text):
    tile = re.search(r"tilesize(\d+x\d+)(?:x(\d+))?", text)
    types = "tf32" if "_tf32" in text else _part(r"_(cf32|cf64|bf16|f16|f32|f64|tf32|i8|e4m3|e5m2)", text)
    convolves = re.search(CONVOLVES, text)
    does = CONVOLVING.get(convolves[0], "") if convolves else ""
    family, maker = ("convolution", "cuDNN") if convolves else ("GEMM", "cuBLAS")
    return family, f"{maker} xmma, sm {match['sm']}", {
        "types": SHORT_TYPES.get(types, types),
        "on": CUDA_CORES if re.search(r"_f32f32_f32f32_f32_\w*_ffma", text) else "",
        "tile": tile[1] if tile else "",
        "K block x stages": _part(r"stage(\d+)", text, f"{tile[2]}x{{}}") if tile and tile[2] else "",
        "epilogue": _epilogue(text),
        "layout": _part(r"_([ntc]{2})_[nt]_", text),
        # These run beside the kernel that multiplies; 3% of its time in the convolutions recorded on the H200.
        "does": f"{SPLIT_K} ({does})" if convolves and "_execute_split_k_" in text else does,
    }  # fmt: skip


CONVOLVES = "fprop|dgrad|wgrad|conv"
CONVOLVING = {"fprop": "forward", "dgrad": "gradient of the input", "wgrad": "gradient of the weight"}


def _convolution(match, text):
    parts = _mma_parts(re.sub("fprop|dgrad|wgrad", "gemm", match["rest"]))
    return "convolution", "cuDNN", {"does": CONVOLVING.get(_part("(fprop|dgrad|wgrad)", text), ""), **parts}


def _implicit_gemm(match, text):
    parts = {"types": "TF32" if "tfloat32_t" in text else "", "does": CONVOLVING[match["way"].lower()]}
    return "convolution", "cuDNN xmma" if text.startswith("xmma_cudnn") else "CUTLASS", parts


def _composable_convolution(match, text):
    way = match["way"]
    backward = "bwd" in way or "backward" in way
    does = CONVOLVING["wgrad" if "weight" in way else "dgrad" if "data" in way else "fprop"]
    known = "weight" in way or "data" in way or not backward
    maker = next((maker for pattern, maker in MAKERS if re.search(pattern, text)), "")
    return "convolution", maker or "by hand", {"does": does if known else "backward"}


# The first letters give the factors' types. Sources: Tensile's DataType.toChar, and names in traces of MI300X:
# B_BS_BH and BBS_BH are bf16, S_B fp32, F8B8BS_BH fp8; S_MX multiplies fp32 as xf32, AMD's TF32.
TENSILE_TYPES = (
    ("S_MX", "TF32"), ("X", "TF32"), ("F8|B8", "fp8"), ("F6|B6", "fp6"), ("F4", "fp4"), ("4xi8|I8", "int8"),
    ("B", "bf16"), ("H", "fp16"), ("S", "fp32"), ("D", "fp64"), ("C", "complex fp32"), ("Z", "complex fp64"),
)  # fmt: skip


def _tensile(match, text):
    if "PostGSU" in text:
        return "reduction", TENSILE, {"does": SPLIT_K}
    types, tile = text[match.end() :], r"_MT(\d+x\d+)x(\d+)"
    return "GEMM", TENSILE, {
        "types": next((said for start, said in TENSILE_TYPES if re.match(start, types)), ""),
        "tile": _part(tile, text),
        "K block": _part(tile, text, "{1}"),
        "indices": f"A {match['a']}, B {match['b']}",
    }  # fmt: skip


TENSILE = "rocBLAS/hipBLASLt Tensile"
SPLIT_K = "adds the parts of a split-K product"
EPILOGUE = "a GEMM's epilogue as a kernel of its own"
# Ops whose names contain underscores. Any other word of a fused name is an op.
COMPOUND_OPS = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention", "_native_batch_norm_legit_functional", "_native_batch_norm_legit",
    "_log_softmax_backward_data", "_softmax_backward_data", "_unsafe_view", "_to_copy", "_log_softmax", "_softmax",
    "native_layer_norm_backward", "native_layer_norm", "native_group_norm_backward", "native_group_norm",
    "native_batch_norm_backward", "native_batch_norm", "native_dropout_backward", "native_dropout",
    "prepare_softmax_online", "embedding_dense_backward", "fused_add_rms_norm", "layer_norm", "rms_norm", "batch_norm",
    "group_norm", "index_select", "index_copy", "index_put", "masked_fill", "slice_scatter", "slice_backward",
    "select_backward", "select_scatter", "nll_loss_forward", "nll_loss_backward", "prims_convert_element_type",
    "convert_element_type", "gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward",
    "threshold_backward", "max_pool2d_with_indices", "flex_attention_backward", "flex_attention", "scalar_tensor",
    "constant_pad_nd", "bitwise_and", "bitwise_or", "bitwise_not", "logical_and", "logical_or", "logical_not",
    "linalg_vector_norm", "var_mean",
)  # fmt: skip
# An op's own trailing underscore (in place: copy_) differs from the separator between ops by what follows it.
OPS = re.compile("|".join([*COMPOUND_OPS, r"[a-z\d]+(?:_(?=$|_(?!to_copy|unsafe|softmax|log_|scaled|native)))?"]))


def _inductor(match, text):
    kind, said = match["kind"], re.sub(r"_(?:\d+|\d+d[\dde]*|[a-z\d]{26,})$", "", match["ops"])
    ops = OPS.findall(said) if not said.isdigit() else []
    parts = {"kind": {"per": "persistent", "tem": "template"}.get(kind, ""), "fuses": ops and "fuses " + ", ".join(ops)}
    family = {"red": "reduction", "per": "reduction", "tem": "GEMM"}.get(kind, "pointwise")
    if kind == "tem":
        family = _family(TEMPLATES, said)
    elif family == "reduction" and _multiplies({*ops}):
        family = "GEMM"  # a matrix-vector product that Inductor wrote itself
    elif family == "reduction" and re.search(NORMS, said):
        family = "normalization"
    elif "embedding" in said and "softmax" not in said:
        family = "embedding"
    return family, "Inductor, C++" if kind == "cpp" else "Inductor, Triton", parts


# A sum that only adds up the parts of a product that another kernel split.
OTHER_SUMS = {"mean", "sum", "amax", "amin", "max", "min", "argmax", "argmin", "var", "_softmax", "rsqrt"}


def _multiplies(ops: set[str]) -> bool:
    """Return whether a kernel with a matrix product among its ops computes that product itself.

    The name lists all ops that contributed to the kernel. A rotary embedding's angles come from a bmm of one column
    with one row, which is a plain multiplication. A kernel that reads a weight names t, its transposition. Without t
    the kernel computes a norm or an argmax (on the H200: grids of a single block, 1 to 34 µs).
    """
    if not {"mm", "bmm"} & ops or {"cos", "sin"} & ops:
        return False
    return "t" in ops or not OTHER_SUMS & ops


# A norm has the op's own name, or the ops that make up RMS norm.
NORMS = "(?:layer|rms|batch|group|instance)_norm|(?:mean|pow|var)_.{0,200}rsqrt"
TEMPLATES = (("attention", "attention"), ("conv", "convolution"), ("mm|linear|gemm", "GEMM"))


def _family(families, text):
    return next((family for words, family in families if re.search(words, text)), "other")


# --- ATen -----------------------------------------------------------------------------------------------------------

# Words around the operation in the name of a kernel's functor.
NO_OPERATION = re.compile(
    r"at|native|c10|std|cuda|detail|internal|apply|binary_internal|lambda|operator|const|instance|array|Array|templates|"
    r"thrust|void|ul|true|false|unsigned|signed|char|int|long|short|float|double|bool|complex|Half|BFloat16|Float[48]_\w+|q?u?int\d+|bits\d+\w*|"
    r"OpaqueType|gpu_kernel_impl(?:_nocast)?|gpu_index_kernel|cuda_take_put_kernel|opmath_\w*|function_traits|"
    r"TensorIterator(?:Base)?|Tensor(?:Base)?|\w*TensorList\w*Metadata|ReduceOp|func_wrapper_t|"
    r"[AB]?UnaryFunctor|BinaryFunctor|(?:Unary|Binary|Pointwise|Ternary)Op\w*Functor|CopyFunctor|NormType|unrolled\w*"
)
OPERATION = re.compile(
    r"CUDAFunctor(?:OnSelf|OnOther)?_(\w+)|(?:launch_|_cuda_)?(\w+?)"
    r"(?:(?:_scalar)?(?:_tensor)?(?:_internal)?_kernel(?:_?cuda)?(?:_impl)?|CUDAKernelImpl|KernelImpl(?:Internal)?|"
    r"Functor|_functor|Ops?|_cuda_out|_cuda_|_scalar|_impl|_and_transform)?"
)
ALIASES = {
    "plus": "add", "minus": "sub", "multiplies": "mul", "mul_scalar": "mul", "divides": "div", "negate": "neg",
    "direct_copy": "copy", "copy_device_to_device": "copy", "tensor_fill": "fill", "argmaxops": "argmax",
    "norm_two": "norm", "norm_one": "norm 1", "norm_zero": "norm 0", "arg_max": "argmax", "arg_min": "argmin",
    "welford": "variance", "nan_sum": "nansum", "max_nan": "max", "min_nan": "min", "lp_norm": "norm",
    "lp_max": "norm", "reduction_add": "add", "reduction_mul": "mul", "pow_tensor": "pow", "pow_scalar_tensor": "pow",
    "power": "pow",
}  # fmt: skip
TYPE = "|".join(sorted(map(re.escape, TYPES), key=len, reverse=True))
FIRST_TYPES = re.compile(rf"(?:lambda\(|<)\s*((?:{TYPE})(?:,\s*(?:{TYPE}))*)\s*[,)>]|(OpaqueType<(\d+))")


def _operation(text: str, start: int) -> str:
    """Return the operation of an ATen kernel: CUDAFunctor_add -> add, GeluCUDAKernelImpl -> gelu."""
    for match in re.finditer(r"[A-Za-z_]\w*", text[start : start + 800]):
        word = match[0]
        if not NO_OPERATION.fullmatch(word) and not word.startswith("_INTERNAL_"):
            found = OPERATION.fullmatch(word)
            said = next((part for part in found.groups() if part), word) if found else word
            said = re.sub(r"(?<=[a-z\d])(?=[A-Z])", "_", said).lower().strip("_")
            said = said.removesuffix("_nocast").removesuffix("_cuda")
            return ALIASES.get(said, said)
    return ""


def _types(text: str, start: int) -> str:
    """Return the element types of an ATen kernel, which come first in its template."""
    found = FIRST_TYPES.search(text, start, start + 800)
    if not found:
        return ""
    if found[2]:
        return f"{found[3]}-byte"
    return ", ".join(dict.fromkeys(TYPES[one] for one in re.findall(TYPE, found[1])))


def _aten(family: str):
    def read(match, text):
        does = _operation(text, match.end())
        found = next((one for pattern, one in ATEN_OPERATIONS if re.match(pattern, does)), family)
        parts = {"does": does, "types": "" if "with_index" in match["name"] else _types(text, match.end("name"))}
        if re.search("[AB]UnaryFunctor|FunctorOn(?:Self|Other)", text[match.end() : match.end() + 200]):
            parts["other operand"] = "a scalar"
        if "vectorized" in match["name"]:
            parts["vector"] = (re.match(r"<(\d+)", text[match.end("name") :]) or ("", ""))[1]
        return found, "ATen", parts

    return read


# Generic kernels; their operation decides the family.
ATEN_OPERATIONS = (
    ("group_norm|batch_norm", "normalization"), (r"amp_|.*non_finite", "optimizer"), (r"(?:\w+_)?copy$", "copy"),
)  # fmt: skip


def _scatter(match, text):
    # _cuda_scatter_gather_internal_kernel<is scatter, …>, _cuda_scatter_fill_internal_kernel<…>, then the reduction
    rest = text[match.end() : match.end() + 800]
    gathers = re.search(r"scatter_gather_internal_kernel<(?:false|0)", rest)
    does = "gather" if gathers else "scatter" + _part(r"Reduce(Add|Multiply|Maximum|Minimum|Mean)", rest, "_{}").lower()
    return "copy", "ATen", {"does": does, "types": _types(text, match.end())}


def _aten_reduction(match, text):
    does = _operation(text, match.end())
    parts = {"does": {"and": "all", "or": "any"}.get(does, does), "types": _types(text, match.end("name"))}
    return "reduction", "ATen", parts


def _softmax(match, text):
    # softmax_warp_forward<input, output, accumulated, log2 of the length, is log softmax, is masked>
    flags = re.search(r"softmax_warp_\w+<(?:[^,<>]+,){3}\s*(\d+),\s*(true|false|0|1)\b", text)
    log = "log softmax" if (flags and _is_true(flags[2])) or "LogSoftMax" in text else "softmax"
    way = "backward" if re.search("[Bb]ackward", match["name"]) else "forward"
    longest = 2 ** min(int(flags[1]), 40) if flags else 0
    return "reduction", "ATen", {
        "does": f"{log}, {way}",
        "types": _types(text, match.end("name")),
        "rows of": f"{longest // 2 + 1} to {longest}" if longest > 1 else "",
    }  # fmt: skip


def _triangle(match, text):
    # triu_tril_kernel<type, index, upper, elements a thread, in place>
    upper = _part(r"triu_tril_kernel<[^,<>]+,[^,<>]+,\s*(true|false|0|1)\b", text)
    does = "triu or tril" if not upper else "triu" if _is_true(upper) else "tril"
    return "pointwise", "ATen", {"does": does, "types": _types(text, match.end("name"))}


def _foreach(match, text):
    """torch's _foreach_ ops and fused optimizers; Apex's and Transformer Engine's of the same name."""
    maker = next((maker for word, maker in FOREACH_MAKERS if word in text), "Apex")
    rest = text[match.end() : match.end() + 800]
    parts = {"types": _types(text, match.end("name")) if maker == "ATen" else ""}
    does = _part("(Adam|SGD|Sgd|Adagrad|LAMB|Lamb|NovoGrad|Lion|RMSprop|Adadelta)", rest).lower()
    if does or "FusedOptimize" in rest or "non_finite" in rest:
        scales = not does and "FusedOptimize" not in rest
        return "optimizer", maker, {"does": "gradient scaling" if scales else does, **parts}
    does = _operation(text, match.end())
    family = "reduction" if re.match("norm|l2_?norm", does) else "copy" if does == "copy" else "pointwise"
    return family, maker, {"does": does, **parts}


FOREACH_MAKERS = (("transformer_engine", "Transformer Engine"), ("at::native", "ATen"), ("colossalai", "ColossalAI"))

# --- attention ------------------------------------------------------------------------------------------------------


def _way(text: str) -> str:
    return "backward" if re.search("bwd|[Bb]ackward|Bwd|bprop|cutlassB|_dkdv|dk_dv", text) else "forward"


def _attends(own: str) -> str:
    """Return "forward" or "backward" for the kernel that computes attention itself; "" for any other."""
    words = own.lower()
    if re.search(r"preprocess|postprocess|combine|reduce|merge|convert|prepare|quant|stage|dot_do_o", words):
        return ""
    way = re.search(r"(?:^|_|::)(fwd|forward|bwd|backward)(?:_|$|\d)", words)
    return "" if not way else _way(way[1])


def _memory_efficient(match, text):
    words = match["rest"].split("_")
    return "attention", MEMORY_EFFICIENT, {
        "does": _way(match[0]),
        "for": _word(words, r"sm\d+").replace("sm", "sm "),
        "types": {"bf16": "bf16", "f16": "fp16", "f32": "fp32"}.get(_word(words, "bf16|f16|f32"), ""),
        "tile": _word(words, r"\d+x\d+"),
        "inputs": _word(words, "(?:not)?aligned"),
        "accumulators": {"rf": "in registers", "gmem": "in global memory"}.get(_word(words, "rf|gmem"), ""),
        "dropout": "yes" if "dropout" in words else "",
    }  # fmt: skip


MEMORY_EFFICIENT = "memory-efficient, CUTLASS"


def _flash(match, text):
    """flash-attention 2, whose traits are <head size, block M, block N, warps, …, type>."""
    traits = re.search(r"Flash_(?:fwd|bwd)_kernel_traits<(\d+), (\d+), (\d+), (\d+),", text)
    typed = _part("(bfloat16_t|half_t|float_e4m3_t)", text)
    # After the traits come dropout, causal, window, …; with K and V split over blocks, causal comes first.
    flags = re.search(r">((?:, *(?:true|false|[01])\b){2,})", text)
    on = [_is_true(flag) for flag in re.findall(r"true|false|[01]", flags[1])] if flags else [False, False]
    split = "splitkv" in match[0]
    window = on[1 if split else 2] if len(on) >= 6 else False  # versions before 2.3 have none
    parts = {"does": "adds the parts of split keys" if "combine" in match[0] else _way(match[0])}
    if traits:
        parts |= {"head size": traits[1], "tile": f"{traits[2]}x{traits[3]}", "warps": traits[4]}
    parts["types"] = {"bfloat16_t": "bf16", "half_t": "fp16", "float_e4m3_t": "fp8"}.get(typed, "")
    if re.search("flash_fwd_kernel|splitkv_kernel|dq_dk_dv", match[0]) and flags:
        parts["causal"] = "yes" if on[0 if split else 1] else "no"
        parts["window"] = "yes" if window else ""
        parts["dropout"] = "yes" if on[0] and not split else ""
    return "attention", "flash attention", parts


# CollectiveMainloopFwdSm90<stages, cluster, tile (M, N, head size), …, element, sums, architecture, causal, window, …>
FLASH_3 = re.compile(
    r"CollectiveMainloopFwdSm90<(?P<stages>\d+), *cute::tuple<(?P<cluster>[^>]*>(?:, *[^>]*>){2}) *>, *"
    r"cute::tuple<(?P<tile>[^>]*>(?:, *[^>]*>){2}) *>, *\d+, *(?P<type>[\w:]+), *float, *cutlass::arch::Sm\d+, *"
    r"(?P<causal>true|false|[01]), *(?P<window>true|false|[01])\b"
)


def _flash_newer(match, text):
    """flash-attention 3 (Hopper's C++), whose forward kernel's name gives its tiles, and 4 (CuTe DSL)."""
    parts = {"does": "adds the parts of split keys"} if "FwdCombine" in match[0] else {"does": _way(text)}
    parts["for"] = _part(r"[Ss]m(\d{2,3})", text, "sm {}")
    if found := FLASH_3.search(text):
        m, n, head = re.findall(r"\d+", found["tile"])
        parts |= {
            "head size": head,
            "tile": f"{m}x{n}",
            "stages": found["stages"],
            "cluster": "x".join(re.findall(r"\d+", found["cluster"])),
            "types": TYPES.get(found["type"], ""),
            "causal": "yes" if _is_true(found["causal"]) else "no",
            "window": "yes" if _is_true(found["window"]) else "",
        }
    return "attention", "flash attention", parts


def _flashinfer(match, text):
    """FlashInfer's prefill: KernelTraits<mask (none, causal, custom, …), queries of a tile, …, type of Q, K, V, …>."""
    traits = re.search(r"KernelTraits<\(flashinfer::MaskMode\)(\d), *(\d+)u?", text)
    typed = re.search(r"__nv_bfloat16|__half|__nv_fp8_e4m3", text)
    return "attention", "FlashInfer", {
        "does": _words(match[0]),
        "queries of a tile": traits[2] if traits else "",
        "types": {"__nv_fp8_e4m3": "fp8"}.get(typed[0]) or TYPES[typed[0]] if typed else "",
        "causal": {"0": "no", "1": "yes"}.get(traits[1], "") if traits else "",
    }  # fmt: skip


def _aiter(match, text):
    """AITER's assembly: fmha_fwd_hd128_bf16_causal_rtne (which rounding) …"""
    words = text.split("_")
    return "attention", "AITER", {
        "does": _way(text),
        "head size": _part(r"_hd(\d+)", text),
        "types": _word(words, "bf16|fp16|fp8"),
        "causal": "yes" if "causal" in words else "",
    }  # fmt: skip


def _composable(match, text):
    # TileFmhaShape<sequence<queries, keys, …>>
    tile = _part(r"TileFmhaShape<ck_tile::sequence<(\d+), *(\d+)", text, "{}x{}")
    does = "split keys" if "SplitKV" in match[0] else "another layout" if "AppendKV" in match[0] else _way(match[0])
    return "attention", "Composable Kernel", {"does": does, "tile": tile}


def _cudnn_attention(match, text):
    return "attention", "cuDNN", {
        "does": _way(text),
        "for": _part(r"_sm(\d+)_", text, "sm {}"),
        "instruction": _part("(wgmma|wmma|hmma|mma)", text),
        "tile": _part(r"knob_\d+((?:_\d+x\d+x\d+)?)", text).strip("_"),
        "knob": _part(r"knob_(\d+)", text),
        "cluster": _part(r"_cga(\d+x\d+x\d+)", text),
    }  # fmt: skip


# --- the rest -------------------------------------------------------------------------------------------------------


def _nccl(match, text):
    words = match[match.lastindex].split("_")
    does = re.sub(r"(?:(?:Ring|Tree|CollNet|NVLS)\w*)?Kernel$", "", words[0])
    details = " ".join(words[1:])
    if does == "Generic":
        return "communication", "RCCL", {"does": "any collective", "details": f"kernel {details}"}
    return "communication", "NCCL", {"does": does, "details": details}


LIGER = (
    r"^_(?:geglu|swiglu|relu_squared|(?:fused_add_|block_|modulated_)?rms_norm|layer_norm|group_norm|poly_norm|dyt|jsd|tv_distance"
    r"|fused_linear_jsd|grpo_loss|kldiv|softmax_(?:single|multi)_block|sparsemax)_?\w{0,40}(?:forward|backward|fwd|bwd)\w{0,30}$"
    r"|^_?triton_(?:llama4_|qwen2vl_m)?rope\w{0,20}$|^_?liger_\w{1,60}$|^_jsd_kernel$|^_kldiv_kernel_\w+$"
)
LIGER_JOBS = (("norm|dyt", "normalization"), ("glu|rope|relu", "pointwise"), ("", "reduction"))
COPIES = {
    **dict.fromkeys(("DtoD", "Device-to-Device", "DeviceToDevice"), "within the GPU's memory"),
    **dict.fromkeys(("HtoD", "Host-to-Device", "HostToDevice"), "from the CPU's memory"),
    **dict.fromkeys(("DtoH", "Device-to-Host", "DeviceToHost"), "to the CPU's memory"),
    "PtoP": "between GPUs",
}


def _says(family: str, maker: str, does: str = ""):
    return lambda match, text: (family, maker, {"does": does})


# Patterns are compiled when first needed, because compiling all takes 12 ms, a tenth of all imports. The first match
# wins, so they go from specific to general. Each is anchored or a plain word, so that none scans a long name twice.
READERS = (
    # the driver
    (r"^Memcpy (\w+)|^\[CUDA memcpy ([\w -]+)\]|^Copy((?:Host|Device)To(?:Host|Device))",
     lambda m, t: ("copy", "driver", {"does": COPIES.get(m[m.lastindex], m[m.lastindex])})),
    (r"^memcpy\d+", _says("copy", "driver, inside a CUDA graph")),
    (r"^Memset|^\[CUDA memset\]|^memset\d+", _says("memset", "driver")),
    (r"^__amd_rocclr_copy", _says("copy", "driver, ROCm")),
    (r"^__amd_rocclr_fill|^FillBuffer$", _says("memset", "driver, ROCm")),
    # NCCL
    (r"^nccl(?:Symk?)?(?:Dev)?Kernel_(\w+)|^nccl([A-Z][a-z]\w+Kernel_\w+)", _nccl),
    (r"^rccl_main_kernel|^ncclKernel", _says("communication", "RCCL", "any collective")),
    # Inductor, before the words of the ops that its kernels name
    (r"^triton_(?P<kind>poi|red|per|tem|for)_(?:fused_)?(?P<ops>\w+)", _inductor),
    (r"^(?:graph_\d+_)?(?P<kind>cpp)_fused_(?P<ops>\w+)", _inductor),
    (r"^triton_(?P<op>mm|bmm|addmm|mm_plus_mm|convolution\w{0,3}|flex_attention\w{0,20})(?:_\d+)*$",
     lambda m, t: (_family(TEMPLATES, m["op"]), "Inductor, Triton", {"kind": "template", "does": m["op"]})),
    (LIGER, lambda m, t: (_family(LIGER_JOBS, m[0]), "Liger, Triton",
                          {"does": m[0].removesuffix("_kernel").strip("_").replace("_", " ")})),
    # AOTriton, which PyTorch calls on AMD GPUs, and flash-attention's Triton version have the same names
    (r"^(?:bare_)?attn_fwd(?:_\w+)?$|^bwd_(?:kernel_(?:dk_?dv|dq|fuse)|preprocess)\w*$",
     lambda m, t: ("attention", "Triton", {"does": "prepares the gradients" if "preprocess" in t else _way(t)})),
    # attention
    (r"^cudnn\w{0,60}sdpa", _cudnn_attention),
    (r"^fmha_cutlass[FB]_(?P<rest>\w+)", _memory_efficient),
    (r"FlashAttn(?:Fwd|Bwd)\w{0,20}|FlashAttentionForward|FlashAttentionBackward|flash_(?:fwd|bwd)_sm\d",
     _flash_newer),
    (r"^flashinfer::\w{0,40}(?:Prefill|Decode)\w{0,40}(?=<|$)", _flashinfer),
    (r"^aiter::fmha_(?:fwd|bwd)_\w+", _aiter),
    (r"(?<![A-Za-z])Fmha(?:Fwd|Bwd)\w{0,40}?Kernel", _composable),
    (r"\bflash_(?:fwd|bwd)_\w+|\bflash::\w+|\bpytorch_flash::\w+", _flash),
    (r"^PyTorchMemEffAttention|^AttentionKernel<", lambda m, t: ("attention", MEMORY_EFFICIENT, {"does": _way(t)})),
    # convolutions, before the GEMMs that they consist of
    (r"cutlass_(?:\d+_)?(?P<rest>\w{0,60}(?:fprop|dgrad|wgrad)\w*)", _convolution),
    (r"^(?:\w{1,40}_)?(?P<rest>(?:[sdhi]|[sh]\d{3,5}|fp16_s|bf16_s\d{0,5})cudnn_\w*)", _convolution),
    (r"^(?:_5x_cudnn_|cudnn_infer_|cudnn_train_)?(?:volta|turing|ampere|maxwell|pascal|hopper)_(?P<rest>\w{0,40}cudnn\w*)",
     _convolution),
    # Composable Kernel's convolutions use kernels that are named for their matrix product.
    (r"(?<![a-z])(?P<way>(?:bwd|backward)_(?:weight|data)|conv(?:nd)?_(?:fwd|forward|bwd|backward)\w{0,12})(?![a-z])",
     _composable_convolution),
    (r"^xmma_cudnn::.{0,80}(?P<way>fprop|dgrad|wgrad)", _implicit_gemm),
    (r"ImplicitGemmConvolution.{0,300}?Conv\dd(?P<way>Fprop|Dgrad|Wgrad)", _implicit_gemm),
    # GEMMs
    (r"^nvjet_(?:sm(?P<sm>\d+)_)?(?P<types>[a-z]+)_(?P<tile>\d+x\d+)_(?P<stages>\d+x\d+)_(?P<cluster>\d+x\d+)_"
     r"(?P<rest>\w+)", _nvjet),
    (r"\bsm(?P<sm>\d+)_xmma_", _xmma),
    (r"\bcutlass3x_sm(?P<sm>\d+)_(?P<rest>\w+)", _cutlass3x),
    (r"\bcutlass_(?P<sm>\d+)_(?P<rest>\w*gemm\w*)", _product("CUTLASS, sm")),
    (CUTLASS_TEMPLATE, _cutlass_template),
    (r"^(?P<sm>volta|turing|ampere|ada|hopper|maxwell|pascal)_(?P<rest>\w*gemm\w*)", _product("cuBLAS,")),
    (r"^(?:Custom_)?Cijk_(?P<a>A[a-z]+)_(?P<b>B[a-z]+)_", _tensile),
    (r"^Cijk_\w*PostGSU", _says("reduction", TENSILE, SPLIT_K)),
    (r"splitK(?:reduce)?_?[Kk]ernel|splitKreduce", _says("reduction", "cuBLAS", SPLIT_K)),
    (r"^cublasLt::epilogue::impl::globalKernelBgrad", _says("reduction", "cuBLAS", "gradient of a GEMM's bias")),
    (r"^cublasLt::(?:epilogue::impl::)?globalKernel|^cublasLt::epilogue", _says("pointwise", "cuBLAS", EPILOGUE)),
    (r"^(?:internal::)?gemv|^gemmSN|^gemmk1_kernel|^dot_kernel|^reduce_1Block_kernel",
     _says("GEMM", "cuBLAS", "vector or thin matrix")),
    # ATen: generic kernels, whose template names the operation
    (r"(?P<name>\bmulti_tensor_apply_kernel)\b", _foreach),
    (r"\b_scatter_gather_elementwise_kernel\b", _scatter),
    (r"(?P<name>\bindex_elementwise_kernel)\b", _aten("copy")),
    (r"(?P<name>\bdistribution\w*elementwise\w*)", _aten("pointwise")),
    (r"(?P<name>\b(?:\w{1,60}_)?elementwise_kernel\w{0,30})(?:<\d+,|<|$)", _aten("pointwise")),
    (r"(?P<name>\bkernelPointwiseApply\d)", _aten("pointwise")),
    (r"\bat::native::(?P<name>reduce_kernel)", _aten_reduction),
    (r"^(?:at::native::)?(?P<name>softmax_warp_(?:for|back)ward|cunn_(?:Spatial)?SoftMax\w*)", _softmax),
    (r"^at::native::(?P<name>triu_tril_kernel)", _triangle),
)  # fmt: skip

# The library; the first match wins.
MAKERS = (
    (r"^c10d::|^(?:one|two)_shot_all_reduce|^multimem_", "PyTorch, symmetric memory"),
    (r"^at_cuda_detail::cub|^cub::|^at::cuda::cub|^DeviceRadixSort", "CUB"),
    (r"^thrust::", "Thrust"),
    (r"^at::|^cunn_|^c10::|^indexing_backward_kernel|^elementwise_kernel_with_index|^compute_cuda_kernel"
     r"|^randperm_handle", "ATen"),
    (r"^rocprim|^hipcub", "rocPRIM"),
    (r"^(?:primus_turbo::)?deep_ep::", "DeepEP"),
    (r"^nvshmem", "NVSHMEM"),
    (r"^gloo", "Gloo"),
    (r"^deep_gemm::", "DeepGEMM"),
    (r"^sm\d+::(?:fwd|decode|prefill|bwd)::|^flash_mla", "FlashMLA"),
    (r"^flashinfer::|^BatchDecodeWith|^BatchPrefillWith|^SinglePrefillWith|^SingleDecodeWith", "FlashInfer"),
    (r"^vllm::|^(?:reshape_and_cache|paged_attention|wvSplitK|LLGemm|concat_and_cache|cross_device_reduce"
     r"|topkGating|moeTopK|moe_align|moe_sum)", "vLLM"),
    (r"^sglang::", "SGLang"),
    (r"^vision::|^nms_kernel_impl|^(?:ps_)?roi_", "torchvision"),
    (r"^marlin|^Marlin", "Marlin"),
    (r"^aiter::|^mfma_moe|^hgemm_bf16_", "AITER"),
    (r"^ck::|^ck_tile::|^kernel_gemm_xdl|^kentry", "Composable Kernel"),
    (r"^tensorrt_llm::|^fmhaSm\d|^(?:bmm|gemm)_(?:Bfloat16|Fp16|Mx)?(?:E\dm\d)?_|^trtllm|^moe::dev::",
     "TensorRT-LLM"),
    (r"^transformer_engine::|^nvte_|^k?userbuffers_", "Transformer Engine"),
    (r"^fbgemm_gpu::|^(?:nvshmem_)?split_embedding|^dense_embedding_codegen|^bounds_check_indices|^l[rxf]u_cache"
     r"|^linearize_cache|^_(?:bfloat16_to_float|float_to_bfloat16)", "FBGEMM"),
    (r"^rocblas_|^hipblas", "rocBLAS"),
    (r"^rocfft|^fft_rtc_", "rocFFT"),
    (r"^msccl", "MSCCL"),
    (r"^primus_turbo::", "Primus Turbo"),
    (r"^cuApplyLayerNorm|^cuCompute(?:Part)?Grad|^welford_kernel|^batchnorm_(?:for|back)ward|^apex", "Apex"),
    (r"^scaled_(?:upper_triang_)?(?:masked_)?softmax_warp", "Megatron"),
    (r"^selective_scan_|^_chunk_(?:scan|state|cumsum)|^_state_passing|^_bmm_chunk|^causal_conv1d", "Mamba"),
    (r"^bnb::|^k(?:gemm_4bit|gemv_4bit|[DQ]e?[qu]\w*antize|Optimizer|Precondition|Int8)", "bitsandbytes"),
    (r"^(?:MIOpen|miopen|Sp3Asm|gcnAsm|igemm_(?:fwd|bwd|wrw)|naive_conv|batched_transpose_\d|Op\dd?Tensor|OpTensor|mlir_gen"
     r"|(?:Sub|Set|Scale|Cast|Copy)Tensor|Im[23]d2Col|Col2Im[23]d|transpose_(?:NCHW|CNHW|packed_MN)|mlo[A-Z]"
     r"|gridwise_(?:generic_reduce|convolution)|Softmax(?:Accurate)?(?:For|Back)ward)", "MIOpen"),
    (r"^cudnn|^cask_?\w*cudnn|^xmma__5x_cudnn|^xmma::ext|^implicit_convolve|^explicit_convolve|^precomputed_convolve"
     r"|^convolve|^op_(?:generic_)?tensor|^fft\dd_|^nchw|^nhwc|^folded|^tensorTransform|^flip_filter|^im2col4d|^softmax_[fb]w"
     r"|^(?:wgrad|dgrad)_|^RNN_|^elemWiseRNNcell|^(?:GRU|LSTM|GENERIC)_|^conv2d_|^calc_bias_diff|^genericTranspose"
     r"|^transpose(?:Warp|Block)|^DSE::|^bn_|^(?:volta|ampere)_lstm", "cuDNN"),
    (r"^(?:regular|vector|composite)_fft|^cufft", "cuFFT"),
    (r"^cusolver|^(?:kernel<)?(?:xx)?(?:getrf|geqr|potrf|trf4|syevj|steqr|gesvdj)", "cuSOLVER"),
    (r"^cusparse", "cuSPARSE"),
    (r"^magma_", "MAGMA, in cuBLAS"),
    (r"^cublas|^cask_?\w*cublas|^internal::|^xmma::gemm|^trsm|^trmm|^syrk|^[sdcz]gemm_largek|^geam_kernel"
     r"|^trsv|^scal_kernel|^transpose_readWrite|^nrm2_kernel|^asum_kernel|^axpy_kernel|^batch_gemm_kernel"
     r"|^gemm_kernel\dx\d", "cuBLAS"),
    (r"^cutlass\w*::", "CUTLASS"),
    (r"^kernel_cutlass_", "CuTe DSL"),
    (r"_tilelang_kernel", "TileLang"),
    (r"^gen_conv|^gen9_conv|^gemm_kernel$|^micro_gemm|^ref_\w+_kernel|^xe_|^simple_reorder|^gen_reorder", "oneDNN"),
    (r"^void kernel_gemm|^ggml|^mul_mat|^dequantize_block", "llama.cpp"),
    (r"^Eigen::|^tensorflow::", "TensorFlow"),
)  # fmt: skip

# Without a known maker, words count only if the name looks like a kernel's, with C++ types after it.
HAND_WRITTEN = re.compile(
    r"^_\w|kernel|_(?:fwd|bwd|forward|backward)(?:_|$)|(?:^|_)triton(?:_|$)|Kernel"
    r"|^reduce_segments$|req_to_token|blockscale_offsets|_fp8_quant"
)

# What a function's name says it does, in either case; the first match wins. does: "" means the name's own words.
JOBS = (
    (r"all_?reduce|cross_device_reduce|multimem|quickreduce", "communication", "AllReduce"),
    (r"deep_ep::\w*::\w*(?:dispatch|combine)|\ball_?to_?all|alltoall|^moeA2A", "communication", "AllToAll"),
    (r"all_?gather|reduce_?scatter|send_?recv|deep_ep|msccl|userbuffers|nvshmem|symmetric_memory|put_signal|wait_signal|rdma|pcie"
     r"barrier|launch_barrier|^gloo|nccl", "communication", ""),
    (r"reshape_and_cache|concat_and_cache|kv_?cache_?(?:write|store|insert|update|copy)|set_mla_kv|write_req_to_token|"
     r"copy_page|cache_kernel|store_?kv_?cache", "copy", "into the KV cache"),
    (r"kv_indices|to_token_pool|slot_mapping|block_tables?(?:_|$)|page_table", "copy", "indices of the KV cache"),
    (r"adam(?!ard)|lamb_?stage|adagrad|novograd|muon|rmsprop|(?<![a-z])(?:sgd|lamb|lion)(?![a-z])|kOptimizer|kPreconditionOptimizer|(?:^|_|::)amp_|"
     r"non_finite", "optimizer", ""),
    (r"BatchNorm|bnorm|bn_(?:fw|bw|inf|stats|pointwise)|BNStats|ScaleBiasStats|batch_norm|dbn_", "normalization",
     "batch norm"),
    (r"nchw\w*nhwc|nhwc\w*nchw|folded|tensorTransform|addPadding|transposeWarp|transposeBlock|batched_transpose|"
     r"convertTensor|reorder|transpose_(?:NCHW|CNHW|packed_MN)|BatchedTransposeKernel", "copy", "another layout"),
    (r"selective_scan|chunk_scan|chunk_state|chunk_cumsum|state_passing|bmm_chunk|mamba|(?:^|_)ssd_|(?<![a-z])RNN|LSTM|(?<![a-z])GRU_",
     "other", "recurrence"),
    (r"winograd|fprop|dgrad|wgrad|depthwise|convolve|igemm_|miopenSp3|fft\dd_[rc]2[rc]|flip_filter|im2col|col2im|"
     r"vol2col|vol2im|Im[23]d2Col|Col2Im[23]d|AsmConv|(?<![a-z])(?:Grouped)?convolution|conv(?:olution)?[123n]d|first_layer_filter|(?<![a-z])conv(?![a-z])|MIOpen\w{0,4}Conv|gen\w?_conv|naive_conv|"
     r"computeOffsetsKernel|::convolution|calc_bias_diff", "convolution", ""),
    (r"(?:regular|vector|composite)_fft|_fft_|fft_|DSE::", "other", "FFT"),
    (r"hadamard", "other", "Hadamard transform"),
    (r"getr[fs]_|xxtrf4_|geqr[f2]_|potr[fs]_|(?:he|sy)ev[jd]_|gesvdj|lasw?p_params", "other", "matrix factorization"),
    # helpers of attention and experts, before the words that name those
    (r"finalizeMoeRouting|moe_sum|moe_finalize", "reduction", "adds what the experts computed"),
    (r"(?:expand|shuffle)InputRows|moe_(?:un)?permute", "copy", "rows to their experts"),
    (r"chunk_(?:fwd|bwd)_kernel|chunk_scaled_dot_kkt|recompute_w_u|solve_tril|merge_\d+x\d+_to_\d+x\d+|fused_recurrent",
     "attention", "linear attention"),
    (r"layer_?norm|rms_?norm|group_?norm|instance_?norm|weight_norm|qk_?norm|l2_?norm_(?:fwd|bwd|kernel)|RowwiseMoments|"
     r"GammaBeta|ComputeFusedParams|ComputeInternalGradients|Compute\w*BackwardFusedParams|divNorm|(?<![a-z])lrn|"
     r"rms_(?:fp8|mxfp4)|^cuCompute(?:Part)?Grad|(?:^|_|::)(?:fused_)?ln(?:_fwd|_bwd|$)|_norm_|add_norm|fused_norm|"
     r"welford|FusedQ?KNorm|Rmsnorm|norm::|QNorm", "normalization", ""),
    (r"rotary|rope|kn_entry_\w*(?:sbhd|thd)", "pointwise", "rotary embedding"),
    (r"topk|top_k|top_p|topp|moe_?align|moe_?sort|count_and_sort|expert_offsets|sort|scan|cumsum|cumprod|histogram|"
     r"unique|non_?zero|DeviceSelect|DeviceCompact|select_sweep|multinomial|gumbel|(?<!up)sampling|searchsorted|Kth|Median|compute_mode|"
     r"DeviceReduceByKey|RunLength|adjacent_difference|mbtopk|randperm|gating|routing|fused_gate|row_id_map|onesweep|lookback|"
     r"rejection_|rejected|recovered_tokens|blockscale_offsets|problem_sizes", "sort and scan", ""),
    (r"attention|(?:^|_)mha_(?:varlen_)?[fb]wd|(?:^|_)fwd_kernel_splitK|(?:^|_)sage_|sageattn|reduce_segments|(?:^|_)attend_|(?:^|_|::|<)attn|_attn|flash_fwd|flash_bwd|fmha|sdpa|mla_(?:a\d|dec|pre)|flash_mla|mqa_logits|"
     r"BatchDecode|BatchPrefill|SinglePrefill|SingleDecode|MergeState|VariableLength|aiter::pa_|gated_delta_rule|"
     r"grouped_kernel_stage|_fwd_kernel_stage|dot_do_o|convert_dq|flash::", "attention", ""),
    (r"embedding|(?:^|_)embs?_|compute_grad_weight|sum_and_scatter|krn_partial|partial_segments|linearize_cache|"
     r"l[rxf]u_cache|bounds_check_indices", "embedding", ""),
    (r"cast_(?:mx|nv)?fp\d|(?:de)quant(?:ize)?(?!\w*gemm)\w*|quant(?!\w*gemm)|amax|fp8_scale", "pointwise", ""),
    (r"(?<!fb)(?<!deep_)gemm|gemv|mat_?vec|matmul|mul_mat|(?:^|_|::)b?mm_|bmm_|fused_moe_kernel|batched_triton_kernel|marlin|fmoe|mfma_moe|wvSplitK|tinygemm|moe_mmk|"
     r"dot_kernel|trmm|trsm|trsv|syrk|syr2k|herk|symm|hemm|flatmm|gptq|awq|sgmv|bgmv|lora_(?:shrink|expand)|largek|region_transform|"
     r"semi_structured_(?:apply|tile)|::gemm::|fused_experts|UniversalGemm|nvjet", "GEMM", ""),
    (r"softmax|sparsemax", "reduction", ""),
    (r"cross_entropy|nll_?loss|ctc_loss|_loss|MarginLoss|kl_?div|(?<![a-z])jsd|ClassNLL", "reduction", "loss"),
    (r"pool|roi_align|adaptive_?(?:average|max)", "reduction", "pooling"),
    (r"dropout", "pointwise", "dropout"),
    (r"act_and_mul|gated_act|(?<![a-z])unary|penalties|MIOpenNeuron|silu|gelu|relu|glu|swish|sigmoid|tanh|"
     r"activation", "pointwise", ""),
    (r"fill|memset", "pointwise", "fill"),
    (r"CatArray|chunk_cat|split_with_sizes|gather|scatter|indexSelect|indexFunc|index_|indexing|_index|take_|flip|(?<!un)roll_|"
     r"transpose|permute|copy|memcpy|concat|_cat_|_pad|pad_|padding|unfold|replication|reflection|slice|sort_chunks|"
     r"stack_|repeat_interleave|compressSparse|laswp|displace", "copy", ""),
    (r"upsample|interpolat|grid_sampler|triu|tril|bilinear", "pointwise", ""),
    (r"reduce|reduction|moe_sum|nrm2|asum|lpnorm|lpmax|norm_cleanup|argmax|argmin|cdist|pdist|MovingAverage|"
     r"(?:^|_)(?:sum|mean|max|min|var)_", "reduction", ""),
    (r"norm", "normalization", ""),
    (r"elementwise|elemwise|op_(?:generic_)?tensor|pointwise|(?:^|_)(?:add|mul|div|sub|scale|cast|clamp|mask|element|"
     r"where|exp|bias)_|apply_kernel|transform_kernel|transform_vals|for_each|convert|_to_float|float_to_|OpTensor|SubTensorOp|prelu|cross_kernel|"
     r"linspace|arange|philox|axpy|scal_kernel|scalePacked|scaleTensor|setTensor|Op\ddTensor|float2half|"
     r"lerp", "pointwise", ""),
    (r"^rocprim::|^hipcub::|cub::", "sort and scan", ""),
)  # fmt: skip


def _words(own: str) -> str:
    """Return the function's own name as words, without namespaces, for kernels of which only the name is known."""
    name = re.sub(r"^.*::|_?(?:CUDA|Cuda)?[Kk]ernel(?:Template)?$", "", re.match(r"[\w:]*", own)[0])
    return re.sub(r"(?<=[a-z\d])(?=[A-Z])|_+", " ", name[:60]).strip().lower()
