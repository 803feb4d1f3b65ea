"""The cycle model meets the goals for array use; that it equals the RTL is tested in ``tests/sim/linear``."""

import pytest

from kvant.hw.linear.cycles import linear_cycles
from kvant.hw.linear.jobs import plan
from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.parameters import ParameterError


@pytest.mark.parametrize(
    "tokens,inputs,outputs,least",
    [(1, 576, 128, 0.95), (64, 576, 128, 0.98), (1, 4096, 4096, 0.97), (64, 4096, 4096, 0.99)],
)
def test_array_use_of_the_default_design(tokens, inputs, outputs, least):
    assert linear_cycles(LinearParameters(), tokens=tokens, inputs=inputs, outputs=outputs).utilisation >= least


def test_jobs_cover_every_token_once_within_the_buffers():
    p = LinearParameters(group=16, rows=4, cols=2, accumulators=6, activation_words=40)
    jobs = plan(p, tokens=11, inputs=50, outputs=7)
    assert [job.first_token for job in jobs] == [0, 2, 4, 6, 8, 10]
    assert sum(job.tokens for job in jobs) == 11
    for job in jobs:
        assert job.tokens * job.groups * p.beats <= p.activation_words
        assert job.tokens * job.interleave <= p.accumulators
        assert (job.groups, job.tail, job.tiles, job.last_cols) == (4, 2, 4, 1)


def test_tiles_stream_block_by_block_and_group_by_group():
    p = LinearParameters(group=16, rows=4, cols=2, accumulators=2, activation_words=64)
    (job,) = plan(p, tokens=1, inputs=32, outputs=6)
    assert list(job.tile_order()) == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize(
    "sizes,words",
    [
        ({"tokens": 0, "inputs": 1, "outputs": 1}, "tokens = 0: legal is at least 1"),
        ({"tokens": 1, "inputs": 65537, "outputs": 1}, "inputs = 65537: legal is 1 to 65536 (activation_words = 8192)"),
        ({"tokens": 1, "inputs": 1, "outputs": 524281}, "outputs = 524281: legal is 1 to 524280"),
    ],
)
def test_products_that_do_not_fit_are_refused(sizes, words):
    with pytest.raises(ParameterError) as refused:
        plan(LinearParameters(), **sizes)
    assert str(refused.value) == words
