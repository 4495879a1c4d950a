"""Dtypes of tensors in checkpoints, without torch: names as torch gives them, and how numpy carries their bits."""

from __future__ import annotations

import numpy as np

#: torch's name to the numpy dtype that carries the bits; bfloat16 travels as its upper half of a float32.
CARRIERS: dict[str, str] = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "float8_e4m3fn": "|u1",
    "float8_e5m2": "|u1",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "|i1",
    "uint8": "|u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "bool": "|b1",
    "complex64": "<c8",
    "complex128": "<c16",
}

#: What the safetensors format calls them; it has no name for complex128.
SAFETENSORS: dict[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "complex64": "C64",
}


def carrier(dtype: str) -> np.dtype[np.generic]:
    """The numpy dtype whose elements have the bits of `dtype`."""
    return np.dtype(CARRIERS[dtype])


def item_bytes(dtype: str) -> int:
    """Bytes of one element."""
    return carrier(dtype).itemsize


def as_numbers(values: np.ndarray, dtype: str) -> np.ndarray:
    """`values` (carried as `dtype`) as numbers: float64, or complex128."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype.startswith("float8"):
        import torch  # noqa: PLC0415  (numpy has no such numbers; the only place that needs torch)

        return torch.from_numpy(values.copy()).view(getattr(torch, dtype)).double().numpy()
    return values.astype(np.complex128 if dtype.startswith("complex") else np.float64)


def as_ordered(values: np.ndarray, dtype: str) -> np.ndarray | None:
    """`values` on the integer line of their format, int64: neighbours differ by 1 ULP, both zeros are 0.

    None where ULPs mean nothing (integers, booleans, complex numbers) or do not fit (float8).
    """
    widths = {
        "float64": (np.int64, 63),
        "float32": (np.int32, 31),
        "float16": (np.int16, 15),
        "bfloat16": (np.int16, 15),
    }
    if dtype not in widths:
        return None
    integer, sign_bit = widths[dtype]
    bits = values.view(integer).astype(np.int64)
    magnitude = bits & ((1 << sign_bit) - 1)
    return np.where(bits < 0, -magnitude, magnitude)
