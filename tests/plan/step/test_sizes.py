"""Values of sizes: defaults, derived values, refusals."""

import pytest

from bytescale_ext.plan.step.sizes import Cluster, Slicing


def test_slicing_as_text():
    assert str(Slicing()) == "1 slice"
    assert str(Slicing(2, 100)) == "2 slices, keys kept up to 100 tokens"
    assert str(Slicing(2, eager=True)) == "2 eager slices, keys kept up to 0 tokens"
    in_host = Slicing(2, 100, summed_tokens=50, swapped_tokens=300)
    assert str(in_host) == "2 slices, keys kept up to 100 tokens, in host memory up to 300, gradient sums up to 50"
    assert [one.longest_kept for one in (in_host, Slicing(2, 100))] == [300, 100]


def test_stages_that_run_two_forwards_ahead():
    plain = Slicing(4, 100)
    ahead = plain.in_eager_order()
    assert ahead == Slicing(4, 100, eager=True)
    assert [(one.order, one.receives_ahead) for one in (plain, ahead)] == [("", False), ("eager", True)]
    assert [[one.extra_warm_up(later) for later in (3, 0)] for one in (plain, ahead)] == [[3, 3], [6, 3]]


def test_the_order_of_work_is_that_of_all_slices_whose_keys_alone_differ():
    slicings = [Slicing(4, 100, eager=True), Slicing(4, 7, eager=True, summed_tokens=5, swapped_tokens=9)]
    assert {one.order_of_work() for one in slicings} == {Slicing(4, eager=True)}
    assert Slicing(2, 9, zero_bubble=True).order_of_work() == Slicing(2, zero_bubble=True)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"num_slices": 0}, "0 slices"),
        ({"num_slices": 2, "kept_tokens": -1}, "up to -1 tokens"),
        ({"num_slices": 2, "swapped_tokens": -2}, "up to -2 tokens are swapped"),
    ],
)
def test_impossible_slicing_is_refused(values, text):
    with pytest.raises(ValueError, match=text):
        Slicing(**values)


@pytest.mark.parametrize(("ranks_per_node", "node_ranks"), [(None, 16), (8, 8), (32, 16)])
def test_a_node_has_at_most_all_ranks(ranks_per_node, node_ranks):
    assert Cluster(16, 1024, ranks_per_node).node_ranks == node_ranks


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((0, 1024), "the number of ranks is 0; it must be at least 1"),
        ((4, 0), "the tokens per rank is 0; it must be at least 1"),
        ((4, 1024, 0), "the ranks per node is 0; it must be at least 1"),
    ],
)
def test_an_impossible_cluster_is_refused(sizes, text):
    with pytest.raises(ValueError, match=text):
        Cluster(*sizes)
