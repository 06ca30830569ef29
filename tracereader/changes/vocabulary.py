"""Names of ops and families of kernels that several changes ask for."""

from tracereader.figures.gpu_work import GpuWork

FOREACH = ("_foreach", "aten::_foreach")  # ops on lists of tensors, of optimizers mostly
# CPU time while the profiler records, in launches (Case.launch_us). From the end of the call before it to its own end,
# a Triton kernel's call takes 5.4 to 8.8 launches (the means of 17 recordings on two machines). The figure is near the
# slowest of them, because a gain that does not come is worse than one that was not promised in full. Inductor's code
# around an op that it does not compile takes 0.9 to 3.4 launches (the medians), and what surrounds Inductor's code 1.4
# to 3.3 launches for each parameter with a gradient.
COMPILED_CALL_LAUNCHES, CALLING_LAUNCHES = 8.5, 2
MASKS = ("aten::masked_fill", "aten::masked_fill_", "aten::where")
# Indexing with a mask calls this op. It waits for the number of elements that the mask selects.
SELECTS = "aten::nonzero"
# Ops whose result has one element for each distinct value or index. The wait for that size cannot be avoided.
NEED_THE_SIZE = ("aten::unique", "aten::_unique", "aten::_coalesce", "aten::_to_sparse")
OF_UNKNOWN_SIZE = (SELECTS, "aten::masked_select", *NEED_THE_SIZE)


def is_compiled(one: GpuWork) -> bool:
    return one.maker.startswith("Inductor")
