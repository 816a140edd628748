"""Progress of a training run: speed, loss, learning rate, remaining time and MFU."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

# Dense bfloat16 FLOP/s of one device by a part of its name, from NVIDIA's data sheets. The first match is used.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
}


def peak_flops(device_name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of a device, or None for a device that is not in the table, such as a CPU."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)


@dataclass(frozen=True)
class Progress:
    """Progress of a training at the end of a log interval.

    Attributes:
        step_seconds: mean seconds per step in the interval.
        loss: language-model loss of the last step; Megatron's own line has the mean of the interval.
        learning_rate: learning rate of the last step, or None.
        gradient_norm: gradient norm of the last step, or None.
        tokens_so_far: tokens that the run has trained on; a resumed run continues the count of its checkpoint.
        eta_seconds: seconds until ``--train-iters`` at this speed.
        mfu: model FLOP/s over the peak FLOP/s of the device (PaLM, appendix B), or None on an unknown device.
        max_attention_logit: largest attention logit of the last step, or None if it is not measured.
    """

    step_seconds: float
    loss: float | None
    learning_rate: float | None
    gradient_norm: float | None
    tokens_so_far: int
    eta_seconds: float
    mfu: float | None
    max_attention_logit: float | None = None

    def scalars(self) -> dict[str, float]:
        """Return the values that are not None, by name."""
        known = {name: value for name, value in vars(self).items() if value is not None}
        return {name: float(value) for name, value in known.items()}

    def line(self) -> str:
        """Return the log line."""
        parts = [f"{self.step_seconds:.3g} s/step"]
        if self.loss is not None:
            parts.append(f"loss of the last step {self.loss:.4f}")
        if self.learning_rate is not None:
            parts.append(f"learning rate {self.learning_rate:.2e}")
        if self.gradient_norm is not None:
            parts.append(f"gradient norm {self.gradient_norm:.3f}")
        if self.max_attention_logit is not None:
            parts.append(f"largest attention logit {self.max_attention_logit:.3f}")
        parts.append(f"{self.tokens_so_far:,} tokens so far")
        parts.append(f"ETA {datetime.timedelta(seconds=round(self.eta_seconds))}")
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.1%}")
        return f" run: {' | '.join(parts)}"
