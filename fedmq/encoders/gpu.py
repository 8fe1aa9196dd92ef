"""Settings for reproducible GPU computation: deterministic kernels, full float32."""

from __future__ import annotations

import os

import torch


def make_gpu_repeatable() -> None:
    """Make this process's GPU computations bitwise reproducible.

    By default, gradients of indexing, scatter and fused attention are summed by atomic additions in varying order, and
    convolutions round to TF32's 10-bit mantissa. Operations without a deterministic kernel warn once.
    """
    # Read when cuBLAS is first used; without it the order of sums in matrix products may vary.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Same as use_deterministic_algorithms(True, warn_only=True) without importing torch._inductor (2 s, 150 MB).
    torch.set_deterministic_debug_mode("warn")
    # No code here reads uninitialised memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # In warn mode these three use nondeterministic kernels; at fifty patches, plain attention costs little more.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def gpu_of(device: str) -> dict[str, str]:
    """The GPU's name under the key ``gpu``, for the run's records; empty for the device ``cpu``."""
    return {} if device == "cpu" else {"gpu": torch.cuda.get_device_name(device)}


def release_unused_gpu_memory() -> None:
    """Return torch's cached, unused GPU memory to the device; does nothing if no GPU was used.

    Otherwise each of the silos that share a GPU would hold a task's peak memory until the run ends.
    """
    torch.cuda.empty_cache()
