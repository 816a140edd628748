"""The walk through a stage's actions, and what is passed to Megatron's schedule functions, on one process."""

from __future__ import annotations

import pytest

from tests.harness import run_ranks

pytestmark = pytest.mark.ranks


def in_one_process(function) -> None:
    run_ranks(function, 1, init_group=False)


def walk(rank: int, world: int) -> None:
    """A stage that misses an action, or ends early, is a bug that is found at once."""
    import pytest

    from bytescale_ext.attention.layouts.slices import sample_layouts
    from bytescale_ext.config.slices import SliceConfig
    from bytescale_ext.plan.step.sizes import Slicing
    from megatron.bytescale.core.pipeline_parallel import seq1f1b
    from megatron.bytescale.runtime import Runtime
    from tests.config.runs import run_of

    config = SliceConfig(Slicing(2), (3, 2), num_stages=1)
    runtime = Runtime.of(run_of(config))
    runtime.add_parts(read_batch=lambda data: {"tokens": next(data)})
    layouts = sample_layouts(config.lengths, 1)
    step = seq1f1b.SliceStep(config.schedule(1), stage=0, training=True)
    batches = seq1f1b.sample_slices(step, runtime, layouts, None, iter(["a", "b"]))
    with pytest.raises(AssertionError):  # nothing runs yet
        next(batches)
    limited = sample_layouts(config.lengths, 1, window=1)
    batches = seq1f1b.sample_slices(step, runtime, layouts, limited, iter(["a", "b"]))
    step._next("F")
    batch, params = next(batches)
    assert batch == {"tokens": "a"}
    assert params.layout is layouts[0]
    assert params.window_layout is limited[0]
    assert params.positions.tolist() == [0, 1, 2]
    step._next("F")
    batch, later = next(batches)
    assert batch == {"tokens": "a"}
    assert later.prefix is params.prefix
    assert later.positions.tolist() == [3, 4]
    with pytest.raises(AssertionError, match="kind"):
        step._next("F")
    with pytest.raises(AssertionError, match="prefixes"):
        step.check_finished()


def test_a_step_walks_through_its_actions() -> None:
    in_one_process(walk)


def rename(rank: int, world: int) -> None:
    """Other names for one call; the module keeps its own."""
    from megatron.core.pipeline_parallel import schedules

    from megatron.bytescale.registry import copy_with_names

    called = []
    changed = copy_with_names(schedules.get_forward_backward_func, forward_backward_no_pipelining=called.append)
    assert changed(pp_size=1, vp_size=None) == called.append
    original = schedules.get_forward_backward_func(pp_size=1, vp_size=None)
    assert original is schedules.forward_backward_no_pipelining
    renamed = copy_with_names(schedules.forward_backward_no_pipelining, forward_step=None)
    assert renamed.__kwdefaults__ == schedules.forward_backward_no_pipelining.__kwdefaults__
    try:
        copy_with_names(schedules.get_forward_backward_func, no_such_name=1)
    except AssertionError:
        return
    raise RuntimeError("a name that the module does not have was accepted")


def test_names_are_changed_for_one_call_only() -> None:
    in_one_process(rename)


def losses(rank: int, world: int) -> None:
    """Megatron divides by the labels given and by micro-batches times slices; slices of any size give the mean."""
    import torch

    from megatron.bytescale.features.slices import build as slices
    from megatron.bytescale.training import stock

    def of_labels(mask: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
        return (
            (mask * values).sum(),
            mask.sum().to(torch.int),
            {"lm loss": torch.stack([(mask * values).sum(), mask.sum()])},
        )

    stock.mean_loss = of_labels  # the original asks Megatron's arguments
    values, mask = torch.rand(2, 10), (torch.rand(2, 10) > 0.4).float()
    mask[:, 7:] = 0.0  # the last slice has no label at all
    parts = (slice(0, 6), slice(6, 7), slice(7, 10))
    per_micro_batch = [slices.slice_loss(mask, mask[:, part], 3, False, values[:, part]) for part in parts]
    mean = sum(total / num_labels.clamp(min=1) / 3 for total, num_labels, _ in per_micro_batch)
    torch.testing.assert_close(mean, (mask * values).sum() / mask.sum())
    per_token = [slices.slice_loss(mask, mask[:, part], 3, True, values[:, part]) for part in parts]
    assert sum(int(num_labels) for _, num_labels, _ in per_token) == int(mask.sum())
    torch.testing.assert_close(sum(total for total, _, _ in per_token), (mask * values).sum())
    for results in (per_micro_batch, per_token):
        report = torch.stack([report["lm loss"] for _, _, report in results]).sum(0)
        torch.testing.assert_close(report, torch.stack([(mask * values).sum(), mask.sum()]))


def test_losses_of_slices_are_those_of_the_micro_batch() -> None:
    in_one_process(losses)
