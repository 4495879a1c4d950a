"""Model FLOPs utilisation: model FLOPs a second over what the devices could do.

The count of FLOPs comes from the model (`mtb_core.model.flops` states the conventions), so activation checkpointing,
sharding and accumulation do not change it.
"""

from __future__ import annotations

# Peak dense FLOP/s by device name, in TFLOP/s: (all of these words in the name, bf16 tensor cores, fp32 without
# tensor cores). Without sparsity, at boost clock, from NVIDIA's data sheets; see docs/model.md. The first match counts.
_PEAKS: tuple[tuple[tuple[str, ...], float, float], ...] = (
    (("H100", "PCIe"), 756.5, 51.2),
    (("H100", "NVL"), 835.5, 60.0),
    (("H200", "NVL"), 835.5, 60.0),
    (("GH200",), 989.4, 66.9),
    (("GB200",), 2500.0, 80.0),
    (("H100",), 989.4, 66.9),
    (("H200",), 989.4, 66.9),
    (("B200",), 2250.0, 75.0),
    (("A100",), 312.0, 19.5),
    (("L40S",), 362.05, 91.6),
    (("L4",), 121.0, 30.3),
    (("A10",), 125.0, 31.2),
)


def device_peak_flops(device_name: str, precision: str) -> float | None:
    """Peak FLOP/s of one device for matrix products in `precision`, or None where it is not known.

    Args:
        device_name: as ``torch.cuda.get_device_name`` gives it; that of a CPU or of a MIG slice is not known.
        precision: ``"bf16"`` or ``"fp32"``. TF32, which a process must switch on by itself, is not counted on.
    """
    words = device_name.replace("-", " ").replace("_", " ").split()
    if "MIG" in words:
        return None
    for names, bf16, fp32 in _PEAKS:
        if all(name in words for name in names):
            return {"bf16": bf16 * 1e12, "fp32": fp32 * 1e12}.get(precision)
    return None


def mfu(tokens_per_sec: float, flops_per_token: float | None, peak: float | None, devices: int) -> float | None:
    """Model FLOPs utilisation of one device, 0 to 1; None where the FLOPs or the peak are not known.

    Args:
        tokens_per_sec: of all devices together.
        flops_per_token: forward and backward, by one convention.
        peak: of one device, FLOP/s.
        devices: how many worked on those tokens.
    """
    if flops_per_token is None or peak is None:
        return None
    return tokens_per_sec * flops_per_token / (peak * devices)
