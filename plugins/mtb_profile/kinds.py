"""What an event is: computation, communication, a copy of memory, or a container of others.

Metadata and category are looked at first, names last: a kernel that carries a collective's metadata communicates
whatever its name, and a text that merely contains "nccl" proves nothing.
"""

from __future__ import annotations

import math
import re
from enum import IntEnum
from functools import cache
from typing import Any

from .reading import Args


class Kind(IntEnum):
    """What time is spent on."""

    COMPUTE = 0
    COMMUNICATION = 1
    MEMORY = 2


#: Categories of the work of a device, as Kineto names them today and named them before 2021.
KERNEL_CATEGORIES = frozenset({"kernel", "Kernel"})
MEMORY_CATEGORIES = frozenset({"gpu_memcpy", "gpu_memset", "Memcpy", "Memset"})
LAUNCH_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "xpu_runtime", "Runtime"})
OPERATOR_CATEGORIES = frozenset({"cpu_op", "Operator"})
ANNOTATION_CATEGORIES = frozenset({"user_annotation"})

# Waiting is no work, whatever category an exporter gave it.
_SYNCHRONISATION = re.compile(r"(Context|Stream|Event) (Sync|Synchronize|Wait)|Stream Wait Event")
_COLLECTIVE_KERNEL = re.compile(
    r"(void )?(nccl(Dev)?Kernel|nccl_|ncclSymk|rccl|mscclKernel|msccl_)"
    r"|(void )?(c10d::symmetric_memory::|symm_mem::)?(one_shot_all_reduce|two_shot_all_reduce|multimem_all_(reduce|gather)|multimem_one_shot)"
)
_GLOO = re.compile(r"gloo:(\w+)$")
#: Operators that only issue communication, or wait for it.
_ISSUING = re.compile(
    r"(c10d|_c10d_functional|c10d_functional|gloo|nccl|mpi)::|(gloo|nccl|mpi|ucc):|record_param_comms$"
)
#: Operators around others. Hooks of DDP and FSDP run, and wait, inside backward's; so their time is not work by itself.
_CONTAINER = re.compile(
    r"autograd::engine::|torch::autograd::|.*Backward\d*$|DistributedDataParallel|Torch-Compiled Region|CompiledFunction"
    r"|AOTDispatcher|## |Optimizer\.|ProfilerStep#|PyTorch Profiler"
)


@cache
def device_kind(name: str, category: str, communicates: bool) -> Kind | None:
    """What a device is doing in an event of one of its categories; None where it only waits.

    Args:
        communicates: the event has the metadata of a collective.
    """
    if communicates:
        return Kind.COMMUNICATION
    if _SYNCHRONISATION.match(name):
        return None
    if category in MEMORY_CATEGORIES:
        return Kind.MEMORY
    return Kind.COMMUNICATION if _COLLECTIVE_KERNEL.match(name) else Kind.COMPUTE


@cache
def operator_computes(name: str) -> bool:
    """Whether the time of a CPU operator is computation, and not issuing, waiting or the sum of what is inside it."""
    return _ISSUING.match(name) is None and _CONTAINER.match(name) is None


@cache
def gloo_operation(name: str) -> str | None:
    """The collective that a ``gloo:`` range is; None for every other name."""
    found = _GLOO.match(name)
    return None if found is None else collective_operation(found[1])


# What torch, NCCL and gloo call them -> the field's name; longer names first.
_OPERATIONS = (
    ("reducescatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("scatter", "scatter"),
    ("gather", "gather"),
    ("reduce", "reduce"),
    ("sendrecv", "send_recv"),
    ("send", "send"),
    ("recv", "recv"),
)


@cache
def collective_operation(name: str) -> str:
    """``_allgather_base``, ``ncclDevKernel_AllGather_RING_LL(…)``, ``all_gather_into_tensor`` -> ``all_gather``."""
    plain = name.partition("(")[0].replace("_", "").lower()
    return next((found for word, found in _OPERATIONS if word in plain), "other")


#: Which collectives no rank can leave before all have come.
SYNCHRONISING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
POINT_TO_POINT = frozenset({"send", "recv", "send_recv"})

_BYTES = {
    "float": 4, "double": 8, "half": 2, "c10::half": 2, "bfloat16": 2, "c10::bfloat16": 2, "int": 4, "long": 8,
    "long int": 8, "short": 2, "char": 1, "signed char": 1, "byte": 1, "unsigned char": 1, "bool": 1, "uint8": 1,
    "int8": 1, "int32": 4, "int64": 8, "uint32": 4, "uint64": 8, "float16": 2, "float32": 4, "float64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "c10::float8_e4m3fn": 1, "c10::float8_e5m2": 1,
}  # fmt: skip


def dtype_bytes(name: Any) -> int | None:
    """Bytes of one element of what a trace calls `name`; None where that is not known."""
    return _BYTES.get(name.lower()) if isinstance(name, str) else None


def message_bytes(args: Args, operation: str, group_size: int | None) -> int | None:
    """The size S of a collective as nccl-tests defines it; None where the trace does not tell.

    S is all of a rank's input or output, whichever is larger.
    """
    if operation == "barrier":
        return 0
    if isinstance(args.in_elements, int) and isinstance(args.out_elements, int):
        width = dtype_bytes(args.dtype)
        known = _is_count(args.in_elements) and _is_count(args.out_elements)
        return max(args.in_elements, args.out_elements) * width if known and width is not None else None
    dims, types = args.input_dims, args.input_type
    if not isinstance(dims, list) or not isinstance(types, list) or not types:
        return None
    width, elements = dtype_bytes(types[0]), _elements_of_all(dims)
    if width is None or elements is None:
        return None
    size = elements * width
    if operation in {"all_gather", "gather"}:  # a gloo range shows what goes in, one rank's part
        return None if group_size is None else size * group_size
    return size


def _is_count(value: Any) -> bool:
    """Whether it can be a number of elements: memory has no more than 2^62 bytes."""
    return isinstance(value, int) and 0 <= value < 1 << 62


def _elements_of_all(tensors: list[Any]) -> int | None:
    found = [_elements(dims) for dims in tensors]
    known = [n for n in found if n is not None]
    return sum(known) if len(known) == len(found) else None


def _elements(dims: Any) -> int | None:
    """Elements of a tensor by its dimensions ([] is a scalar), or of a list of tensors; None where they make no sense."""
    if not isinstance(dims, list):
        return 0
    if any(isinstance(d, list) for d in dims):
        return _elements_of_all(dims)
    if not all(_is_count(d) for d in dims):
        return None
    count = math.prod(dims)
    return count if _is_count(count) else None


def bus_factor(operation: str, ranks: int | None) -> float | None:
    """The ratio busbw / algbw as nccl-tests defines it (``doc/PERFORMANCE.md``); None where it does not, or with unknown ranks."""
    if ranks is None or ranks < 1:
        return None
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if operation in {"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"}:
        return (ranks - 1) / ranks
    return 1.0 if operation in {"broadcast", "reduce", "send", "recv", "send_recv"} else None
