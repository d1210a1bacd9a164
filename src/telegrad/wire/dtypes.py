"""The dtypes of tensors on the wire: a small integer code for each."""

from __future__ import annotations

from typing import Any

import torch

# The position in this list is what travels, so it may only grow at its end.
_DTYPE_NAMES = """
    float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128
    complex32 uint16 uint32 uint64
    float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2
    uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7
    bcomplex32 bits1x8 bits2x4 bits4x2 bits8 bits16
""".split()  # noqa: SIM905  # one row per family reads better than a list
DTYPES: list[Any] = [getattr(torch, name, None) for name in _DTYPE_NAMES]
CODES = {dtype: code for code, dtype in enumerate(DTYPES) if dtype is not None}
NUMPY_CODES = frozenset(
    CODES[getattr(torch, name)] for name in _DTYPE_NAMES[:12] if name != "bfloat16"
)


def code_of(dtype: torch.dtype) -> int:
    return CODES[dtype]


def stackable_code(dtype: torch.dtype) -> int | None:
    """Return the code of a dtype whose tensors can be stacked and split; None: they cannot."""
    code = CODES.get(dtype)
    return code if code in NUMPY_CODES or dtype is torch.bfloat16 else None


def dtype_of(code: int) -> torch.dtype:
    dtype: torch.dtype = DTYPES[code]
    return dtype
