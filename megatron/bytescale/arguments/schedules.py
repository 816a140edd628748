"""Checks the schedules of the learning rate and the weight decay, which Megatron asserts without naming a flag."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedules:
    """The learning rate and the weight decay of a training, before Megatron checks them; None: not given.

    A training counts steps or samples, and its schedules count the same.
    """

    lr: float | None
    min_lr: float
    lr_warmup_init: float
    lr_warmup_fraction: float | None
    lr_warmup_iters: int
    lr_warmup_samples: int
    lr_decay_iters: int | None
    lr_decay_samples: int | None
    lr_decay_style: str
    lr_wsd_decay_iters: int | None
    lr_wsd_decay_samples: int | None
    weight_decay: float
    start_weight_decay: float | None
    end_weight_decay: float | None
    weight_decay_incr_style: str
    override_opt_param_scheduler: bool
    use_checkpoint_opt_param_scheduler: bool
    train_iters: int | None
    train_samples: int | None
    skip_train: bool

    @property
    def unit(self) -> str:
        """The unit of a duration, as the ending of a flag: iters or samples."""
        return "iters" if self.train_iters else "samples"

    @property
    def decay(self) -> tuple[str, int | None]:
        """The flag that sets the length of the decay, and the length; None: nothing sets it."""
        given = getattr(self, f"lr_decay_{self.unit}")
        return (
            (f"--train-{self.unit}", getattr(self, f"train_{self.unit}"))
            if given is None
            else (f"--lr-decay-{self.unit}", given)
        )

    def wrong(self) -> Iterator[str]:
        """Yield a reason for each value that Megatron's scheduler refuses."""
        yield from self._wrong_units()
        yield from self._wrong_rates()
        if self.train_iters or self.train_samples:
            yield from self._wrong_lengths()
        yield from self._wrong_weight_decay()
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            yield "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other: give one"

    def _wrong_units(self) -> Iterator[str]:
        """Yield a reason for each length in another unit than the training's, and for two lengths of one part."""
        if self.skip_train:
            return
        if self.train_iters and self.train_samples:
            yield "--train-iters and --train-samples exclude each other: give one"
            return
        if not self.train_iters and not self.train_samples:
            if self.train_iters is None and self.train_samples is None:
                yield "no --train-iters: give the number of steps, or --train-samples"
            return
        other = "samples" if self.unit == "iters" else "iters"
        for part in ("lr-decay", "lr-warmup", "lr-wsd-decay"):
            if getattr(self, f"{part.replace('-', '_')}_{other}"):
                yield f"--{part}-{other} does not count as --train-{self.unit} does: give --{part}-{self.unit}"
        if self.lr_warmup_fraction is not None and getattr(self, f"lr_warmup_{self.unit}"):
            yield f"--lr-warmup-fraction and --lr-warmup-{self.unit} exclude each other: give one"

    def _wrong_rates(self) -> Iterator[str]:
        if self.lr is None:
            if not self.skip_train:
                yield "no --lr: give the largest learning rate"
            return
        if self.lr < 0:
            yield f"--lr {self.lr:g} must be at least 0"
            return
        for flag, value in (("--min-lr", self.min_lr), ("--lr-warmup-init", self.lr_warmup_init)):
            if not 0 <= value <= self.lr:
                yield f"{flag} {value:g} must be at least 0 and at most --lr {self.lr:g}"

    def _wrong_lengths(self) -> Iterator[str]:
        flag, length = self.decay
        if length is not None and length < 1:
            yield f"{flag} {length} must be at least 1"
            return
        warmup_flag, warmup = f"--lr-warmup-{self.unit}", getattr(self, f"lr_warmup_{self.unit}")
        fraction = self.lr_warmup_fraction
        if fraction is not None and not 0 <= fraction < 1:
            yield f"--lr-warmup-fraction {fraction:g} must be at least 0 and less than 1"
        if warmup < 0:
            yield f"{warmup_flag} {warmup} must be at least 0"
        elif length is not None and warmup >= length:
            yield f"{warmup_flag} {warmup} must be less than {flag} {length}, in which the learning rate decays"
        end_flag, end = f"--lr-wsd-decay-{self.unit}", getattr(self, f"lr_wsd_decay_{self.unit}")
        if self.lr_decay_style == "WSD" and end is None:
            yield f"--lr-decay-style WSD needs {end_flag}, the length of the last part"
        elif self.lr_decay_style == "WSD" and length is not None and not 1 <= end <= length:
            yield f"{end_flag} {end} must be at least 1 and at most {flag} {length}"

    def _wrong_weight_decay(self) -> Iterator[str]:
        start, end = self.start_weight_decay, self.end_weight_decay
        if self.weight_decay_incr_style == "constant":
            for flag, value in (("--start-weight-decay", start), ("--end-weight-decay", end)):
                if value is not None:
                    yield f"{flag} {value:g} needs --weight-decay-incr-style linear or cosine"
            if self.weight_decay < 0:
                yield f"--weight-decay {self.weight_decay:g} must be at least 0"
        elif start is None or end is None:
            yield (
                f"--weight-decay-incr-style {self.weight_decay_incr_style} needs --start-weight-decay and "
                "--end-weight-decay"
            )
        elif not 0 <= start <= end:
            yield f"--start-weight-decay {start:g} must be at least 0 and at most --end-weight-decay {end:g}"
