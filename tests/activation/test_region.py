from __future__ import annotations

import torch

from bytescale_ext.activation.region import TensorView, elements_of, num_bytes, region_of


def same_region(one: torch.Tensor, other: torch.Tensor) -> bool:
    return region_of(one) == region_of(other)


def test_views_of_the_same_elements_have_one_region() -> None:
    base = torch.arange(2 * 3 * 4.0).view(2, 3, 4)
    for view in (base.view(6, 4), base.transpose(0, 2), base[:, None], base.flatten(), base.permute(1, 2, 0)):
        assert same_region(base, view)


def test_parts_with_gaps() -> None:
    base = torch.arange(24.0).view(2, 3, 4)
    part = base[..., :2]
    assert same_region(part, part.reshape(6, 2))  # which is a view
    assert same_region(part, part.unsqueeze(1))
    assert same_region(part, part.transpose(0, 1))
    assert not same_region(part, base[..., 2:])


def test_expanded_tensors_have_none() -> None:
    assert region_of(torch.ones(3, 1).expand(3, 4)) is None
    assert region_of(torch.ones(6).as_strided((3, 3), (1, 1))) is None
    assert region_of(torch.empty(0, 4)) is None
    assert region_of(torch.tensor(2.0)) is not None


def test_elements_come_back_as_any_view() -> None:
    base = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    for tensor in (
        base,
        base.transpose(1, 3),
        base[:, :, 1:3].permute(2, 0, 1, 3),
        base[..., :2],
        base[:, :1],
        base[0, 0, 0, 0],
    ):
        stored = elements_of(tensor).clone()
        view = TensorView.of(tensor)
        assert torch.equal(view.apply(stored), tensor)
        again = view.apply_as_saved(stored)
        assert torch.equal(again, tensor)
        assert again.stride() == tensor.stride() or again.is_contiguous()
        assert num_bytes(tensor) == stored.numel() * 4


def test_gaps_come_back_on_cpu() -> None:
    part = torch.arange(24.0).view(2, 3, 4)[..., 1:3]
    again = TensorView.of(part).apply_as_saved(elements_of(part))
    assert torch.equal(again, part)
    assert again.stride() == part.stride()


def test_only_contiguous_elements_are_used_as_they_are() -> None:
    base = torch.arange(24.0).view(2, 3, 4)
    for tensor, is_plain in ((base, True), (base.mT, False), (base[..., :2], False), (base.view(-1)[::2], False)):
        view = TensorView.of(tensor)
        assert view.is_plain is is_plain
        stored = elements_of(tensor).clone()
        again = view.apply_as_saved(stored.view(view.sizes) if is_plain else stored)
        assert torch.equal(again, tensor)
        assert again.stride() == view.strides or not is_plain
