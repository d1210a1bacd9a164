"""The CUDA driver: the functions that torch does not offer, and the CUDA context of a thread.

The driver library is called with `ctypes`. Streams and device memory are plain integers here.

State: the devices whose context a thread has initialized, per thread.
"""

from __future__ import annotations

import ctypes
import functools
import threading

import torch

from telegrad.errors import TelegradError

# CU_POINTER_ATTRIBUTE_BUFFER_ID. Unlike an address, a buffer id is never reused in a process.
_POINTER_ATTRIBUTE_BUFFER_ID = 7
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_HANDLE_BYTES = 64

DevicePointer = ctypes.c_uint64


class _IpcMemHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * _HANDLE_BYTES),)


class CudaError(TelegradError):
    """A call of the CUDA driver failed."""


class Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver: a copy of rows, with a pitch between rows on each side."""

    _fields_ = (
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_type", ctypes.c_uint),
        ("source_host", ctypes.c_void_p),
        ("source_device", DevicePointer),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("destination_x", ctypes.c_size_t),
        ("destination_y", ctypes.c_size_t),
        ("destination_type", ctypes.c_uint),
        ("destination_host", ctypes.c_void_p),
        ("destination_device", DevicePointer),
        ("destination_array", ctypes.c_void_p),
        ("destination_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class CudaDriver:
    """The functions of the CUDA driver that torch does not offer."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"cannot load the CUDA driver library: {error}") from error
        self._library.cuMemcpyDtoDAsync_v2.argtypes = (
            DevicePointer,
            DevicePointer,
            ctypes.c_size_t,
            ctypes.c_void_p,
        )
        self._library.cuIpcOpenMemHandle_v2.argtypes = (
            ctypes.POINTER(DevicePointer),
            _IpcMemHandle,
            ctypes.c_uint,
        )
        self._library.cuIpcGetMemHandle.argtypes = (ctypes.POINTER(_IpcMemHandle), DevicePointer)
        self._library.cuIpcCloseMemHandle.argtypes = (DevicePointer,)
        self._library.cuMemcpyDtoHAsync_v2.argtypes = (
            ctypes.c_void_p,
            DevicePointer,
            ctypes.c_size_t,
            ctypes.c_void_p,
        )
        self._library.cuMemcpy2DAsync_v2.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._library.cuStreamQuery.argtypes = (ctypes.c_void_p,)

    def buffer_id(self, pointer: int) -> int:
        """Return the id of the allocation that contains `pointer`, unique in this process."""
        buffer_id = ctypes.c_uint64()
        code = self._library.cuPointerGetAttribute(
            ctypes.byref(buffer_id), _POINTER_ATTRIBUTE_BUFFER_ID, DevicePointer(pointer)
        )
        self._check("cuPointerGetAttribute", code)
        return buffer_id.value

    def allocation_base(self, pointer: int) -> int:
        """Return the start address of the allocation that contains `pointer`."""
        base, size = DevicePointer(), ctypes.c_size_t()
        code = self._library.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(size), DevicePointer(pointer)
        )
        self._check("cuMemGetAddressRange_v2", code)
        return base.value

    def ipc_handle(self, base: int) -> bytes:
        """Return the IPC handle of the allocation that starts at `base`."""
        handle = _IpcMemHandle()
        self._check(
            "cuIpcGetMemHandle", self._library.cuIpcGetMemHandle(ctypes.byref(handle), base)
        )
        return bytes(handle)

    def open_ipc_handle(self, handle: bytes) -> int:
        """Map an allocation of another process and return its address here."""
        base = DevicePointer()
        structure = _IpcMemHandle.from_buffer_copy(handle)
        code = self._library.cuIpcOpenMemHandle_v2(ctypes.byref(base), structure, _LAZY_PEER_ACCESS)
        self._check("cuIpcOpenMemHandle", code)
        return base.value

    def close_ipc_handle(self, base: int) -> None:
        """Unmap an allocation that `open_ipc_handle` mapped at `base`."""
        self._check("cuIpcCloseMemHandle", self._library.cuIpcCloseMemHandle(base))

    def copy_async(self, destination: int, source: int, size: int, stream: int) -> None:
        """Enqueue a copy from device to device."""
        code = self._library.cuMemcpyDtoDAsync_v2(destination, source, size, stream)
        if code:
            self._check("cuMemcpyDtoDAsync", code)

    def copy_to_host_async(self, destination: int, source: int, size: int, stream: int) -> None:
        """Enqueue a copy from a device to pinned host memory."""
        code = self._library.cuMemcpyDtoHAsync_v2(destination, source, size, stream)
        if code:
            self._check("cuMemcpyDtoHAsync", code)

    def copy_2d_async(self, copy_2d: Memcpy2D, stream: int) -> None:
        """Enqueue a copy of rows from pinned host memory to a device."""
        code = self._library.cuMemcpy2DAsync_v2(ctypes.addressof(copy_2d), stream)
        if code:
            self._check("cuMemcpy2DAsync", code)

    def is_stream_idle(self, stream: int) -> bool:
        """Return whether all work of a stream has completed."""
        code = self._library.cuStreamQuery(stream)
        if code not in (0, _NOT_READY):
            self._check("cuStreamQuery", code)
        idle: bool = code == 0
        return idle

    def _check(self, function: str, code: int) -> None:
        """Raise `CudaError` if `code` is an error that `function` returned."""
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise CudaError(f"the CUDA driver function {function} failed: {reason} ({code})")


class _DriverThreadState(threading.local):
    """The devices whose CUDA context the thread has initialized."""

    ready_devices: frozenset[int] = frozenset()


_thread = _DriverThreadState()


@functools.cache
def cuda_driver() -> CudaDriver:
    """Return the CUDA driver of this process."""
    return CudaDriver()


@functools.cache
def device_uuids() -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that this process sees, by index."""
    if not torch.cuda.is_available():
        return ()
    return tuple(
        str(torch.cuda.get_device_properties(index).uuid)
        for index in range(torch.cuda.device_count())
    )


def ensure_context(index: int) -> None:
    """Initialize the CUDA context of a device in this thread, so that driver calls work."""
    if index not in _thread.ready_devices:
        with torch.cuda.device(index):
            # Any operation of torch on the device initializes the context.
            torch.cuda.Event().record()  # type: ignore[no-untyped-call]
        _thread.ready_devices |= {index}


def is_current_device(index: int) -> bool:
    """Return whether a device is current: the driver uses the default stream of that device."""
    ensure_context(index)
    current: int = torch._C._cuda_getDevice()
    return current == index


def current_raw_stream(index: int) -> int:
    """Return the driver's handle of the current stream of a device."""
    raw_stream: int = torch._C._cuda_getCurrentRawStream(index)
    return raw_stream


def copy_async(destination: int, source: int, size: int, stream: torch.cuda.Stream) -> None:
    """Enqueue a copy from device to device."""
    if not is_current_device(stream.device_index):
        with torch.cuda.device(stream.device_index):
            copy_async(destination, source, size, stream)
            return
    cuda_driver().copy_async(destination, source, size, stream.cuda_stream)
