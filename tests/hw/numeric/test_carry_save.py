"""Carry-save sums against Python's integers."""

import itertools
import random

import pytest
from amaranth.hdl import Cat, Module, Signal
from amaranth.sim import Simulator

from kvant.hw.numeric.carry_save import CarrySaveTree, Heap, folded, levels_of, product_rows, square_rows


def simulate(m, bench, *, clocked):
    simulator = Simulator(m)
    if clocked:
        simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()


@pytest.mark.parametrize(
    ("words", "levels"), [(0, 0), (1, 0), (2, 0), (3, 1), (4, 2), (6, 3), (9, 4), (13, 5), (40, 8)]
)
def test_levels_grow_as_the_logarithm_of_the_words(words, levels):
    assert levels_of(words) == levels


@pytest.mark.parametrize("width", [2, 3, 8])
def test_rows_of_squares_and_products_are_exact_for_every_number(width):
    m = Module()
    a, b = Signal(width), Signal(width + 1)
    square, product, difference = Heap(2 * width), Heap(2 * width + 1), Heap(2 * width + 2)
    magnitude = Signal(width - 1)
    m.d.comb += magnitude.eq(folded(a))
    square.add(square_rows(a[-1], magnitude))
    product.add(product_rows(a, b))
    difference.add(product_rows(a, b))
    difference.subtract(square_rows(a[-1], magnitude))
    heaps = (square, product, difference)
    words = [heap.words() for heap in heaps]
    assert len(words[0]) == width // 2 + 1 + (width == 3) and len(words[1]) == width

    async def bench(ctx):
        for x, y in itertools.product(range(1 << width), range(0, 2 << width, 1 if width < 4 else 37)):
            ctx.set(Cat(a, b), x | y << width)
            await ctx.delay(1e-9)
            negative = x - (x >> width - 1 << width)
            for heap, rows, right in zip(heaps, words, (negative**2, x * y, x * y - negative**2), strict=True):
                modulus = 1 << heap.width
                assert sum(ctx.get(row) for row in rows) % modulus == right % modulus

    simulate(m, bench, clocked=False)


def test_what_lies_above_the_width_is_dropped():
    a = Signal(4)
    heap = Heap(3)
    heap.add([(a, 0), (a, 2), (a, 3)])
    heap.subtract([(a, 1), (a, 5)])

    async def bench(ctx):
        for value in range(16):
            ctx.set(a, value)
            await ctx.delay(1e-9)
            assert sum(ctx.get(word) for word in heap.words()) % 8 == (value + 4 * value - 2 * value) % 8

    m = Module()
    m.d.comb += Signal(4).eq(a)
    simulate(m, bench, clocked=False)


@pytest.mark.parametrize("levels_per_stage", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 20])
def test_a_tree_gives_two_words_with_the_sum_every_cycle_after_its_latency(count, levels_per_stage):
    rng = random.Random(count)
    m = Module()
    words = [Signal(9, name=f"word_{index}") for index in range(count)]
    tree = CarrySaveTree(count, levels_per_stage=levels_per_stage)
    assert tree.latency == -(-levels_of(count) // levels_per_stage)
    pair = tree.build(m, "tree", words, 9)
    total = Signal(9)
    m.d.comb += total.eq(pair[0] + pair[1])
    sets = [[0] * count, [511] * count, *([rng.randrange(512) for _ in words] for _ in range(30))]

    async def bench(ctx):
        for cycle in range(len(sets) + tree.latency):
            ctx.set(Cat(words), sum(v << 9 * i for i, v in enumerate(sets[min(cycle, len(sets) - 1)])))
            if cycle >= tree.latency:
                assert ctx.get(total) == sum(sets[cycle - tree.latency]) % 512
            await (ctx.tick() if tree.latency else ctx.delay(1e-9))

    simulate(m, bench, clocked=tree.latency > 0)
