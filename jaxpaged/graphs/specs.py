"""What the compiler has to know of a GPU that is not there: one frozen record per GPU, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

_TEXT = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {s.shared_per_core}
  shared_memory_per_block_optin: {s.shared_per_block}
  threads_per_core_limit: {s.threads_per_core} core_count: {s.num_cores} fpus_per_core: {s.fpus_per_core}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {s.bandwidth} l2_cache_size: {s.l2_bytes} clock_rate_ghz: {s.clock_ghz}
  device_memory_size: {s.memory_bytes}
  cuda_compute_capability {{ major: {s.capability[0]} minor: {s.capability[1]} feature_extension: {extension} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability {s.capability[0]}.{s.capability[1]}"
  device_address_bits: 64 name: "{s.device_kind}"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
  device_interconnect_info {{ active_links: {s.links} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 }}
device_description_str: "{s.device_kind}"
"""


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """One GPU. Sizes in bytes, `bandwidth` in bytes/s, `bf16_flops` dense and per second, from its data sheet."""

    device_kind: str  # as JAX names the device
    capability: tuple[int, int]
    accelerated: bool  # instructions of this architecture alone (wgmma, tcgen05): sm_90a, sm_100a
    num_cores: int  # streaming multiprocessors
    shared_per_core: int
    shared_per_block: int  # most that a kernel may ask for
    threads_per_core: int
    fpus_per_core: int
    clock_ghz: float
    l2_bytes: int
    memory_bytes: int
    bandwidth: int
    bf16_flops: float
    links: int  # NVLinks

    @property
    def architecture(self) -> str:
        """ptxas' name of it, such as sm_90a."""
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if self.accelerated else ''}"

    def text_proto(self) -> str:
        """XLA's GpuTargetConfig in protobuf's text format."""
        return _TEXT.format(s=self, extension="ACCELERATED_FEATURES" if self.accelerated else "NONE")


_H100 = GpuSpec(
    device_kind="NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    accelerated=True,
    num_cores=132,
    shared_per_core=233472,
    shared_per_block=232448,
    threads_per_core=2048,
    fpus_per_core=128,
    clock_ghz=1.98,
    l2_bytes=52428800,
    memory_bytes=84942979072,
    bandwidth=3352320000000,
    bf16_flops=989e12,
    links=18,
)

GPUS = MappingProxyType(
    {
        "a100": GpuSpec(
            device_kind="NVIDIA A100-SXM4-80GB",
            capability=(8, 0),
            accelerated=False,
            num_cores=108,
            shared_per_core=167936,
            shared_per_block=166912,
            threads_per_core=2048,
            fpus_per_core=64,
            clock_ghz=1.41,
            l2_bytes=41943040,
            memory_bytes=85100068864,
            bandwidth=2039040000000,
            bf16_flops=312e12,
            links=12,
        ),
        "l4": GpuSpec(
            device_kind="NVIDIA L4",
            capability=(8, 9),
            accelerated=False,
            num_cores=58,
            shared_per_core=102400,
            shared_per_block=101376,
            threads_per_core=1536,
            fpus_per_core=128,
            clock_ghz=2.04,
            l2_bytes=50331648,
            memory_bytes=24000000000,
            bandwidth=300000000000,
            bf16_flops=121e12,
            links=0,
        ),
        "h100": _H100,
        "h200": replace(_H100, device_kind="NVIDIA H200", memory_bytes=151397597184, bandwidth=4800000000000),
        "b200": GpuSpec(
            device_kind="NVIDIA B200",
            capability=(10, 0),
            accelerated=True,
            num_cores=148,
            shared_per_core=233472,
            shared_per_block=232448,
            threads_per_core=2048,
            fpus_per_core=128,
            clock_ghz=1.965,
            l2_bytes=132644864,
            memory_bytes=191514411008,
            bandwidth=7672320000000,
            bf16_flops=2250e12,
            links=18,
        ),
    }
)
