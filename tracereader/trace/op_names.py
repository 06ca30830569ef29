"""Names of ATen ops that the reader asks for in more than one place: one vocabulary for all of them."""


def aten(names: str) -> frozenset[str]:
    """Return the names of ATen ops, which are given without "aten::", separated by blanks."""
    return frozenset(f"aten::{name}" for name in names.split())


PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")
# Ops that only copy a value from the GPU.
READ_A_VALUE = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero")
FROM_PYTHON = "aten::lift_fresh"  # tensors that Python makes come through this op
FILLS = ("aten::fill_", "aten::zero_")  # ops that set memory to a value
FOREACH = ("_foreach", "aten::_foreach")  # ops on lists of tensors, of optimizers mostly
MASKS = ("aten::masked_fill", "aten::masked_fill_", "aten::where")
# Indexing with a mask calls this op. It waits for the number of elements that the mask selects.
SELECTS = "aten::nonzero"
# Ops whose result has one element for each distinct value or index. The wait for that size cannot be avoided.
NEED_THE_SIZE = ("aten::unique", "aten::_unique", "aten::_coalesce", "aten::_to_sparse")
SOFTMAX_BACKWARD = "aten::_softmax_backward_data"
ADDS = ("aten::add", "aten::add_")
# Ops that index with a tensor, and copy it to the GPU if it lies on the CPU.
INDEXES = ("aten::index", "aten::_index_put_impl_")
BATCHED, SOFTMAX = ("aten::bmm", "aten::baddbmm"), "aten::_softmax"
MATMULS = (*PRODUCTS, "aten::_scaled_mm")
# The op that calls one of these backends, or a fallback of several ops.
SDPA = "aten::scaled_dot_product_attention"
SDPA_MATH = "aten::_scaled_dot_product_attention_math"
# Ops that copy a tensor, also to another device, and do nothing else.
COPYING = ("aten::copy_", "aten::_to_copy", "aten::to")
TAKES_A_PART = ("aten::select", "aten::slice")
CUTS = ("aten::unbind", "aten::split", "aten::chunk")
SLICES = (*TAKES_A_PART, *CUTS)
# A loop writes into memory that these ops allocate. One batched call allocates its result itself.
EMPTY = ("aten::empty", "aten::empty_like", "aten::new_empty")
# torch.compile leaves these eager, nn.LSTM, nn.GRU and nn.RNN among them.
RNNS, FFTS = ("aten::_cudnn_rnn", "aten::miopen_rnn"), "aten::_fft_"
# Ops that copy their input to the contiguous layout if it has another one.
NEED_CONTIGUOUS = ("aten::native_group_norm", "aten::group_norm", "aten::instance_norm")
# The ops of an uncompiled forward. Other attention does not call both of them.
SAFE_SOFTMAX, LOGSUMEXP = "aten::_safe_softmax", "aten::logsumexp"
OF_UNKNOWN_SIZE = (SELECTS, "aten::masked_select", *NEED_THE_SIZE)
