"""What the driver, the CUDA runtime and cuDNN say of a device. For scripts/calibrate."""

import ctypes
import os

# Values of cudaDeviceAttr: the clocks in kHz, the width of the memory bus in bits, the L2 cache in bytes.
ATTRIBUTES = {"clock_khz": 13, "memory_clock_khz": 36, "bus_bits": 37, "l2_bytes": 38}
# The number after the last value of CUdevice_attribute in CUDA 13, with room for later ones.
ALL_ATTRIBUTES = 200
# Values of cuDNN's graph API: the type of a description of a device, and its attributes.
DESCRIPTION, DESCRIPTION_HANDLE, DESCRIPTION_TEXT = 38, 2701, 2702
TYPE_HANDLE, TYPE_CHAR = 0, 24


def driver(nvml):
    text = ctypes.create_string_buffer(96)
    return "" if nvml.nvmlSystemGetDriverVersion(text, 96) else text.value.decode()


def attributes(torch):
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return dict.fromkeys(ATTRIBUTES, 0)
    found, value = {}, ctypes.c_int()
    for name, number in ATTRIBUTES.items():
        failed = runtime.cudaDeviceGetAttribute(ctypes.byref(value), number, 0)
        found[name] = 0 if failed else value.value
    return found


def driver_attributes():
    """Returns the driver's attributes of the first device, by number."""
    cuda, found, value = ctypes.CDLL("libcuda.so.1"), {}, ctypes.c_int()
    for number in range(1, ALL_ATTRIBUTES):
        if cuda.cuDeviceGetAttribute(ctypes.byref(value), number, 0) == 0:
            found[number] = value.value
    return found


def cudnn_description(torch):
    """Returns cuDNN's own description of the device, or `None` if this cuDNN has none (before 9.8)."""
    torch.backends.cudnn.version()  # loads the library
    try:
        cudnn = ctypes.CDLL("libcudnn.so.9", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
    handle, description = ctypes.c_void_p(), ctypes.c_void_p()
    count, text = ctypes.c_int64(), ctypes.create_string_buffer(1 << 16)
    place, one, size = ctypes.byref(description), ctypes.c_int64(1), ctypes.c_int64(len(text))
    if cudnn.cudnnCreate(ctypes.byref(handle)) or cudnn.cudnnBackendCreateDescriptor(DESCRIPTION, place):
        return None
    where = description, DESCRIPTION_HANDLE, TYPE_HANDLE, one, ctypes.byref(handle)
    if cudnn.cudnnBackendSetAttribute(*where) or cudnn.cudnnBackendFinalize(description):
        return None
    what = description, DESCRIPTION_TEXT, TYPE_CHAR, size, ctypes.byref(count), text
    return None if cudnn.cudnnBackendGetAttribute(*what) else text.value.decode()
