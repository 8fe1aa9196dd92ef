"""What a GPU has to be told to compute as a CPU does: the same sums in the same order, in full float32."""

from __future__ import annotations

import os

import torch


def repeatable() -> None:
    """Have this process's GPUs repeat to the bit, from here on.

    Gradients of an index, of a scatter and of the fused kinds of attention are summed by atomic additions otherwise, in
    whatever order threads come, and convolutions are rounded to TF32's ten bits. An operation that has no ordered
    kernel warns, once, and goes on.
    """
    # Read when cuBLAS is first used; without it products of one shape may be summed in another order.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # As use_deterministic_algorithms(True, warn_only=True), without its import of torch._inductor: 2 s and 150 MB.
    torch.set_deterministic_debug_mode("warn")
    # Nothing here reads memory that nobody wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # All three have ordered kernels only where whatever has none raises; fifty patches' attention costs next to
    # nothing anyway.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def kind_of(device: str) -> dict[str, str]:
    """What a GPU is called, as ``gpu``, for the record; nothing for the CPU.

    Args:
        device: ``cpu`` or ``cuda:N``.
    """
    return {} if device == "cpu" else {"gpu": torch.cuda.get_device_name(device)}


def give_back() -> None:
    """Let other processes have the GPU memory that nothing here uses; does nothing where no GPU was used.

    Torch keeps what it once had: of thirty silos that share a GPU each would hold a task's peak until the run ends.
    """
    torch.cuda.empty_cache()
