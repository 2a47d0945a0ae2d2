"""The few calls of Vulkan that memory needs: which types a device has, and an allocation that others can import."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int, c_uint8, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

LIBRARY = "libvulkan.so.1"
VERSION_1_1 = 1 << 22 | 1 << 12
DEVICE_LOCAL, HOST_VISIBLE, HOST_COHERENT = 1, 2, 4
FLAGS = {
    DEVICE_LOCAL: "device_local", HOST_VISIBLE: "host_visible", HOST_COHERENT: "host_coherent", 8: "host_cached",
    16: "lazily_allocated", 32: "protected",
}  # fmt: skip
OPAQUE_FD = 1
EXTERNAL_MEMORY_FD = b"VK_KHR_external_memory_fd"
NAME_OFFSET, NAME_BYTES = 20, 256  # VkPhysicalDeviceProperties.deviceName
ERRORS = {
    -1: "out of host memory", -2: "out of device memory", -3: "initialisation failed", -4: "device lost",
    -5: "memory map failed", -7: "extension not present", -9: "incompatible driver", -10: "too many objects",
}  # fmt: skip


class VulkanError(Exception):
    """A call's name and why it failed."""


@dataclass(frozen=True)
class MemoryType:
    index: int
    flags: int
    heap_bytes: int

    def __str__(self) -> str:
        names = " ".join(name for flag, name in FLAGS.items() if self.flags & flag)
        return f"{self.index}: {names or 'none'}; heap of {self.heap_bytes >> 20} MiB"


class Vulkan:
    """An instance. OSError where there is no loader, VulkanError where no driver will have it."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._library = ctypes.CDLL(library)
        for name, (result, *arguments) in SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
        self._instance = c_void_p()
        application = _Application(api=VERSION_1_1, sType=0)
        wanted = _InstanceInfo(sType=1, application=_address(application))
        self.call("vkCreateInstance", byref(wanted), None, byref(self._instance))

    def devices(self) -> list[Device]:
        count = c_uint32()
        self.call("vkEnumeratePhysicalDevices", self._instance, byref(count), None)
        handles = (c_void_p * count.value)()
        self.call("vkEnumeratePhysicalDevices", self._instance, byref(count), handles)
        return [Device(self, handle) for handle in handles[: count.value]]

    def call(self, name: str, *arguments: object) -> None:
        """VulkanError unless it succeeds; some calls return nothing."""
        _check(name, getattr(self._library, name)(*arguments))

    def function(self, device: c_void_p, name: str, *arguments: Any) -> Callable[..., int]:
        """One of an extension."""
        address = self._library.vkGetDeviceProcAddr(device, name.encode())
        if not address:
            raise VulkanError(f"{name}: the driver has none")
        return ctypes.CFUNCTYPE(c_int, *arguments)(address)

    def close(self) -> None:
        """Idempotent."""
        self._library.vkDestroyInstance(self._instance, None)
        self._instance = c_void_p()


class Device:
    """A physical device. `uuid`: 16 bytes, by which CUDA knows it too."""

    def __init__(self, vulkan: Vulkan, handle: int) -> None:
        self._vulkan, self._handle = vulkan, c_void_p(handle)
        identity = _Identity(sType=1000071004)
        properties = _Properties(sType=1000059001, pNext=_address(identity))
        vulkan.call("vkGetPhysicalDeviceProperties2", self._handle, byref(properties))
        name = bytes(properties.properties)[NAME_OFFSET : NAME_OFFSET + NAME_BYTES]
        self.name, self.uuid = name.split(b"\0")[0].decode(errors="replace"), bytes(identity.device)
        memory = _MemoryProperties()
        vulkan.call("vkGetPhysicalDeviceMemoryProperties", self._handle, byref(memory))
        self.memory_types = [
            MemoryType(i, each.flags, memory.heaps[each.heap].size)
            for i, each in enumerate(memory.types[: memory.type_count])
        ]

    def exportable(self, memory_type: MemoryType, size_bytes: int) -> ExportedMemory:
        return ExportedMemory(self._vulkan, self._handle, memory_type, size_bytes)


class ExportedMemory:
    """Memory of a device that the CPU stores to at `address`, and that others import by a descriptor."""

    def __init__(self, vulkan: Vulkan, device: c_void_p, memory_type: MemoryType, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._vulkan, self._device, self._memory = vulkan, c_void_p(), c_uint64()
        try:
            self._open(device)
            export = _ExportInfo(sType=1000072002, handle_types=OPAQUE_FD)
            wanted = _AllocateInfo(5, _address(export), size_bytes, memory_type.index)
            vulkan.call("vkAllocateMemory", self._device, byref(wanted), None, byref(self._memory))
            address = c_void_p()
            vulkan.call("vkMapMemory", self._device, self._memory, 0, size_bytes, 0, byref(address))
        except BaseException:
            self.close()
            raise
        self.address = address.value or 0

    def _open(self, device: c_void_p) -> None:
        priority, extensions = c_float(1), (c_char_p * 1)(EXTERNAL_MEMORY_FD)
        queue = _QueueInfo(sType=2, count=1, priorities=_address(priority))
        wanted = _DeviceInfo(
            sType=3, queue_count=1, queues=_address(queue), extension_count=1, extensions=_address(extensions)
        )
        self._vulkan.call("vkCreateDevice", device, byref(wanted), None, byref(self._device))

    def export(self) -> int:
        """A descriptor, the caller's."""
        get = self._vulkan.function(self._device, "vkGetMemoryFdKHR", c_void_p, c_void_p, POINTER(c_int))
        wanted, fd = _FdInfo(1000074002, None, self._memory.value, OPAQUE_FD), c_int(-1)
        _check("vkGetMemoryFdKHR", get(self._device, _address(wanted), byref(fd)))
        return fd.value

    def close(self) -> None:
        """Idempotent; the mapping goes too. Who has imported it keeps it."""
        if self._device:
            self._vulkan.call("vkFreeMemory", self._device, self._memory, None)
            self._vulkan.call("vkDestroyDevice", self._device, None)
            self._device = c_void_p()


def _check(name: str, result: int | None) -> None:
    if result:
        raise VulkanError(f"{name}: {ERRORS.get(result, f'error {result}')}")


def _address(of: Any) -> int:
    """For a call during which the caller keeps `of`."""
    return ctypes.addressof(of)


SIGNATURES: dict[str, list[Any]] = {  # the result, then the arguments
    "vkCreateInstance": [c_int, c_void_p, c_void_p, c_void_p],
    "vkDestroyInstance": [None, c_void_p, c_void_p],
    "vkEnumeratePhysicalDevices": [c_int, c_void_p, c_void_p, c_void_p],
    "vkGetPhysicalDeviceProperties2": [None, c_void_p, c_void_p],
    "vkGetPhysicalDeviceMemoryProperties": [None, c_void_p, c_void_p],
    "vkCreateDevice": [c_int, c_void_p, c_void_p, c_void_p, c_void_p],
    "vkDestroyDevice": [None, c_void_p, c_void_p],
    "vkGetDeviceProcAddr": [c_void_p, c_void_p, c_char_p],
    "vkAllocateMemory": [c_int, c_void_p, c_void_p, c_void_p, c_void_p],
    "vkFreeMemory": [None, c_void_p, c_uint64, c_void_p],
    "vkMapMemory": [c_int, c_void_p, c_uint64, c_uint64, c_uint64, c_uint32, c_void_p],
}


class _Application(Structure):
    _fields_ = (
        ("sType", c_int), ("pNext", c_void_p), ("name", c_char_p), ("version", c_uint32), ("engine", c_char_p),
        ("engine_version", c_uint32), ("api", c_uint32),
    )  # fmt: skip


class _InstanceInfo(Structure):
    _fields_ = (
        ("sType", c_int), ("pNext", c_void_p), ("flags", c_uint32), ("application", c_void_p),
        ("layer_count", c_uint32), ("layers", c_void_p), ("extension_count", c_uint32), ("extensions", c_void_p),
    )  # fmt: skip


class _QueueInfo(Structure):
    _fields_ = (
        ("sType", c_int), ("pNext", c_void_p), ("flags", c_uint32), ("family", c_uint32), ("count", c_uint32),
        ("priorities", c_void_p),
    )  # fmt: skip


class _DeviceInfo(Structure):
    _fields_ = (
        ("sType", c_int), ("pNext", c_void_p), ("flags", c_uint32), ("queue_count", c_uint32), ("queues", c_void_p),
        ("layer_count", c_uint32), ("layers", c_void_p), ("extension_count", c_uint32), ("extensions", c_void_p),
        ("features", c_void_p),
    )  # fmt: skip


class _Identity(Structure):
    _fields_ = (
        ("sType", c_int), ("pNext", c_void_p), ("device", c_uint8 * 16), ("driver", c_uint8 * 16),
        ("local", c_uint8 * 8), ("node_mask", c_uint32), ("local_valid", c_uint32),
    )  # fmt: skip


class _Properties(Structure):
    """The properties are 824 bytes of limits and names."""

    _fields_ = (("sType", c_int), ("pNext", c_void_p), ("properties", c_uint8 * 1024))


class _MemoryTypeFields(Structure):
    _fields_ = (("flags", c_uint32), ("heap", c_uint32))


class _Heap(Structure):
    _fields_ = (("size", c_uint64), ("flags", c_uint32))


class _MemoryProperties(Structure):
    _fields_ = (
        ("type_count", c_uint32), ("types", _MemoryTypeFields * 32), ("heap_count", c_uint32), ("heaps", _Heap * 16)
    )  # fmt: skip


class _ExportInfo(Structure):
    _fields_ = (("sType", c_int), ("pNext", c_void_p), ("handle_types", c_uint32))


class _AllocateInfo(Structure):
    _fields_ = (("sType", c_int), ("pNext", c_void_p), ("size", c_uint64), ("type_index", c_uint32))


class _FdInfo(Structure):
    _fields_ = (("sType", c_int), ("pNext", c_void_p), ("memory", c_uint64), ("handle_type", c_uint32))
