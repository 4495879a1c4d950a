"""What an event is taken for, and how large a collective is."""

from __future__ import annotations

import pytest

from mtb_profile.kinds import (
    Kind,
    bus_factor,
    collective_operation,
    device_kind,
    gloo_operation,
    message_bytes,
    operator_computes,
)
from mtb_profile.reading import Args


@pytest.mark.parametrize(
    ("name", "category", "metadata", "kind"),
    [
        (
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "kernel",
            False,
            Kind.COMMUNICATION,
        ),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*)", "kernel", False, Kind.COMMUNICATION),
        ("anything", "kernel", True, Kind.COMMUNICATION),
        ("void at::native::vectorized_elementwise_kernel<4>(int)", "kernel", False, Kind.COMPUTE),
        ("my_fused_nccl_like_kernel", "kernel", False, Kind.COMPUTE),
        ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", False, Kind.MEMORY),
        ("Memset (Device)", "gpu_memset", False, Kind.MEMORY),
        ("Stream Sync", "kernel", False, None),
        ("Event Wait", "kernel", False, None),
    ],
)
def test_device_work(name, category, metadata, kind):
    """Metadata first, then category, then the beginning of the name; waiting is no work."""
    assert device_kind(name, category, metadata) == kind


@pytest.mark.parametrize(
    ("name", "computes"),
    [
        ("aten::mm", True),
        ("graph_0_cpp_fused_gelu_0", True),
        ("torch.distributed.ddp.reducer::copy_bucket_to_grad", True),
        ("c10d::allreduce_", False),
        ("_c10d_functional::wait_tensor", False),
        ("autograd::engine::evaluate_function: AddmmBackward0", False),
        ("AddmmBackward0", False),
        ("torch::autograd::AccumulateGrad", False),
    ],
)
def test_operators(name, computes):
    """Issuing, waiting, and containers (in which DDP's and FSDP's hooks wait) are no computation by themselves."""
    assert operator_computes(name) is computes


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("allreduce", "all_reduce"),
        ("allreduce_coalesced", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("all_gather_into_tensor_coalesced", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("all_to_allv", "all_to_all"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevComm*)", "reduce_scatter"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", "send_recv"),
        ("ncclDevKernel_Reduce_Sum_f32", "reduce"),
        ("gather", "gather"),
        ("ncclDevKernel_Generic_4", "other"),
    ],
)
def test_operations(name, operation):
    """All spellings of an operation are one."""
    assert collective_operation(name) == operation


def test_gloo_ranges():
    """Ranges of gloo are known by their whole name."""
    assert gloo_operation("gloo:all_gather") == "all_gather"
    assert gloo_operation("my gloo:all_gather") is None
    assert gloo_operation("gloo: all of it") is None


def test_message_bytes():
    """S is all of a rank's input or output, whichever is larger, as nccl-tests has it; unknown is None, never 0."""
    gathered = Args(in_elements=10, out_elements=40, dtype="BFloat16")
    assert message_bytes(gathered, "all_gather", 4) == 80
    shapes = Args(input_dims=[[3, 5]], input_type=["float"])
    assert message_bytes(shapes, "all_reduce", None) == 60
    assert message_bytes(shapes, "all_gather", 4) == 240
    assert message_bytes(shapes, "all_gather", None) is None
    assert message_bytes(Args(input_dims=[[]], input_type=["double"]), "all_reduce", 2) == 8
    assert message_bytes(Args(input_dims=[[[3], [4]]], input_type=["float"]), "all_reduce", 2) == 28
    assert message_bytes(Args(input_dims=[[3]], input_type=["strange"]), "all_reduce", 2) is None
    for count in (-10, 10**40):
        wrong = Args(in_elements=count, out_elements=10, dtype="Float")
        assert message_bytes(wrong, "all_reduce", 2) is None
        for dims in ([[count]], [[3], [2, count]], [[[3], [count]]], [["3"]]):
            assert message_bytes(Args(input_dims=dims, input_type=["float"]), "all_reduce", 2) is None
    assert message_bytes(Args(), "all_reduce", 2) is None
    assert message_bytes(Args(), "barrier", 2) == 0


def test_bus_factor():
    """The factors are nccl-tests'."""
    assert [bus_factor(o, 4) for o in ("all_reduce", "all_gather", "broadcast", "other")] == [1.5, 0.75, 1.0, None]
    assert bus_factor("all_reduce", None) is None
