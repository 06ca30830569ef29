"""Names of ops and families of kernels that several changes ask for."""

from tracereader.figures.gpu_work import GpuWork

FOREACH = ("_foreach", "aten::_foreach")  # ops on lists of tensors, of optimizers mostly
MASKS = ("aten::masked_fill", "aten::masked_fill_", "aten::where")
# Indexing with a mask calls this op. It waits for the number of elements that the mask selects.
SELECTS = "aten::nonzero"
# Ops whose result has one element for each distinct value or index. The wait for that size cannot be avoided.
NEED_THE_SIZE = ("aten::unique", "aten::_unique", "aten::_coalesce", "aten::_to_sparse")
OF_UNKNOWN_SIZE = (SELECTS, "aten::masked_select", *NEED_THE_SIZE)


def is_compiled(one: GpuWork) -> bool:
    return one.maker.startswith("Inductor")
