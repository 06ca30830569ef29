# run 5d81228ebeb48290: what Inductor generated
# AOT ID: ['0_inference']
from ctypes import c_void_p, c_long, c_int
import torch
import math
import random
import os
import tempfile
from math import inf, nan
from cmath import nanj
from torch._inductor.hooks import run_intermediate_hooks
from torch._inductor.utils import maybe_profile
from torch._inductor.codegen.memory_planning import _align as align
from torch import device, empty_strided
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels

aten = torch.ops.aten
inductor_ops = torch.ops.inductor
_quantized = torch.ops._quantized
assert_size_stride = torch._C._dynamo.guards.assert_size_stride
assert_size_stride_grouped = torch._C._dynamo.guards.assert_size_stride_grouped
assert_alignment = torch._C._dynamo.guards.assert_alignment
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
empty_strided_cpu_pinned = torch._C._dynamo.guards._empty_strided_cpu_pinned
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
empty_strided_xpu = torch._C._dynamo.guards._empty_strided_xpu
empty_strided_mtia = torch._C._dynamo.guards._empty_strided_mtia
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor
alloc_from_pool = torch.ops.inductor._alloc_from_pool
async_compile = AsyncCompile()
empty_strided_p2p = torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p


cpp_fused__unsafe_view_gelu_mul_0 = async_compile.cpp_pybinding(['at::BFloat16*', 'const at::BFloat16*'], r'''
#include <torch/csrc/inductor/aoti_runtime/utils.h>
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(at::BFloat16* in_out_ptr0,
                       const at::BFloat16* in_ptr0)
{
    std::atomic<int> inductor_cpu_integer_div_error{0};
    inductor_cpu_integer_div_error_flag = &inductor_cpu_integer_div_error;
    torch::aot_inductor::RAIIAtenRecordFunctionHandle record_graph_0_cpp_fused__unsafe_view_gelu_mul_0_("graph_0_cpp_fused__unsafe_view_gelu_mul_0", nullptr);
    #pragma omp parallel
    {
        int tid = omp_get_thread_num();
        {
            #pragma omp for
            for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(25165824L); x0+=static_cast<int64_t>(32L))
            {
                {
                    if(C10_LIKELY(x0 >= static_cast<int64_t>(0) && x0 < static_cast<int64_t>(25165824L)))
                    {
                        auto tmp0 = at::vec::Vectorized<at::BFloat16>::loadu(in_out_ptr0 + static_cast<int64_t>(x0), static_cast<int64_t>(32));
                        auto tmp20 = at::vec::Vectorized<at::BFloat16>::loadu(in_ptr0 + static_cast<int64_t>(x0), static_cast<int64_t>(32));
                        auto tmp1 = at::vec::convert<float,2,at::BFloat16,1>(tmp0);
                        auto tmp2 = static_cast<float>(0.5);
                        auto tmp3 = at::vec::VectorizedN<float,2>(tmp2);
                        auto tmp4 = tmp1 * tmp3;
                        auto tmp5 = tmp1 * tmp1;
                        auto tmp6 = tmp5 * tmp1;
                        auto tmp7 = static_cast<float>(0.044715);
                        auto tmp8 = at::vec::VectorizedN<float,2>(tmp7);
                        auto tmp9 = tmp6 * tmp8;
                        auto tmp10 = tmp1 + tmp9;
                        auto tmp11 = static_cast<float>(0.7978845608028654);
                        auto tmp12 = at::vec::VectorizedN<float,2>(tmp11);
                        auto tmp13 = tmp10 * tmp12;
                        auto tmp14 = tmp13.tanh();
                        auto tmp15 = static_cast<float>(1.0);
                        auto tmp16 = at::vec::VectorizedN<float,2>(tmp15);
                        auto tmp17 = tmp14 + tmp16;
                        auto tmp18 = tmp4 * tmp17;
                        auto tmp19 = (tmp18);
                        auto tmp21 = at::vec::convert<float,2,at::BFloat16,1>(tmp20);
                        auto tmp22 = tmp19 * tmp21;
                        auto tmp23 = at::vec::convert<at::BFloat16,1,float,2>(tmp22);
                        tmp23.store(in_out_ptr0 + static_cast<int64_t>(x0), static_cast<int64_t>(32));
                    }
                }
            }
        }
    }
    inductor_cpu_integer_div_error_flag = nullptr;
    inductor_cpu_throw_if_integer_div_error(inductor_cpu_integer_div_error);
}
''')


async_compile.wait(globals())
del async_compile

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def recursively_apply_fns(self, fns):
        new_callables = []
        for fn, c in zip(fns, self.partitions):
            new_callables.append(fn(c))
        self.partitions = new_callables

    def call(self, args):
        arg0_1, arg1_1, arg2_1, arg3_1 = args
        args.clear()
        assert_size_stride_grouped((arg1_1, arg0_1), ((64, 128, 768), (3072, 768)), ((98304, 768, 1), (768, 1)), 'input')
        buf0 = empty_strided_cpu((8192, 3072), (3072, 1), torch.bfloat16)
        # Topologically Sorted Source Nodes: [gate], Original ATen: [aten.view, aten.t, aten.mm]
        extern_kernels.mm(reinterpret_tensor(arg1_1, (8192, 768), (768, 1), 0), reinterpret_tensor(arg0_1, (768, 3072), (1, 768), 0), out=buf0)
        del arg0_1
        assert_size_stride(arg2_1, (3072, 768), (768, 1), 'input')
        buf1 = empty_strided_cpu((8192, 3072), (3072, 1), torch.bfloat16)
        # Topologically Sorted Source Nodes: [up], Original ATen: [aten.view, aten.t, aten.mm]
        extern_kernels.mm(reinterpret_tensor(arg1_1, (8192, 768), (768, 1), 0), reinterpret_tensor(arg2_1, (768, 3072), (1, 768), 0), out=buf1)
        del arg1_1
        del arg2_1
        buf2 = reinterpret_tensor(buf0, (64, 128, 3072), (393216, 3072, 1), 0); del buf0  # reuse
        assert_size_stride(arg3_1, (768, 3072), (3072, 1), 'input')
        cpp_fused__unsafe_view_gelu_mul_0(buf2, buf1)
        del buf1
        buf3 = empty_strided_cpu((8192, 768), (768, 1), torch.bfloat16)
        # Topologically Sorted Source Nodes: [gate, gelu, up, mul, linear_2], Original ATen: [aten._unsafe_view, aten.gelu, aten.mul, aten.view, aten.t, aten.mm]
        extern_kernels.mm(reinterpret_tensor(buf2, (8192, 3072), (3072, 1), 0), reinterpret_tensor(arg3_1, (3072, 768), (1, 3072), 0), out=buf3)
        del arg3_1
        return (reinterpret_tensor(buf3, (64, 128, 768), (98304, 768, 1), 0), )

runner = Runner(partitions=[])
call = runner.call
recursively_apply_fns = runner.recursively_apply_fns


def get_args():
    from torch._dynamo.testing import rand_strided
    arg0_1 = rand_strided((3072, 768), (768, 1), device='cpu', dtype=torch.bfloat16)
    arg1_1 = rand_strided((64, 128, 768), (98304, 768, 1), device='cpu', dtype=torch.bfloat16)
    arg2_1 = rand_strided((3072, 768), (768, 1), device='cpu', dtype=torch.bfloat16)
    arg3_1 = rand_strided((768, 3072), (3072, 1), device='cpu', dtype=torch.bfloat16)
    return [arg0_1, arg1_1, arg2_1, arg3_1]


def benchmark_compiled_module(args, times=10, repeat=10):
    from torch._inductor.utils import print_performance
    fn = lambda: call(list(args))
    return print_performance(fn, times=times, repeat=repeat, device='cpu')


if __name__ == "__main__":
    from torch._inductor.wrapper_benchmark import compiled_module_main
    args = get_args()
    compiled_module_main('None', lambda times, repeat: benchmark_compiled_module(args, times=times, repeat=repeat))
