"""Numbers that stand for dtypes on the wire.

The code of a dtype is its position in `DTYPES`. A dtype that this version of torch does not have is
None there, so codes are the same in all versions.
"""

from __future__ import annotations

from typing import Any

import torch

# Positions are part of the wire format: add new names only at the end.
_DTYPE_NAMES = """
    float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128
    complex32 uint16 uint32 uint64
    float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2
    uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7
    bcomplex32 bits1x8 bits2x4 bits4x2 bits8 bits16
""".split()  # noqa: SIM905  # one row per family reads better than a list
_NUMPY_NAMES = [name for name in _DTYPE_NAMES[:12] if name != "bfloat16"]

DTYPES: list[Any] = [getattr(torch, name, None) for name in _DTYPE_NAMES]
CODES = {dtype: code for code, dtype in enumerate(DTYPES) if dtype is not None}
NUMPY_CODES = frozenset(CODES[getattr(torch, name)] for name in _NUMPY_NAMES)


def code_of(dtype: torch.dtype) -> int:
    """Return the code of a dtype. Raise `KeyError` for quantized dtypes, which have none."""
    return CODES[dtype]


def stackable_code(dtype: torch.dtype) -> int | None:
    """Return the code of a dtype whose tensors can be stacked and split; None for other dtypes."""
    code = CODES.get(dtype)
    return code if code in NUMPY_CODES or dtype is torch.bfloat16 else None


def dtype_of(code: int) -> torch.dtype:
    """Return the dtype that has this code."""
    dtype: torch.dtype = DTYPES[code]
    return dtype
