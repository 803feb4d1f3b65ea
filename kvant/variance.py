"""The variance unit as a block of the product: generated, simulated with a user's groups, compared."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from amaranth.hdl import Shape

from kvant import config
from kvant.blocks import Vectors
from kvant.config import Config
from kvant.errors import InputError
from kvant.simulated import Run, SimulatedBlock, shape_arrays
from kvant.tensors import ArraySpec, check_arrays, scalar

ARRAYS = [ArraySpec("q", "int8", ("B", "n"), required=True), ArraySpec("group", "integer")]
"""What ``kvant simulate variance`` takes: one group per row. The unit is built for their length; `group` may say it."""

BENCH_GROUPS = 40
"""Groups of a generated bench."""


class VarianceBlock(SimulatedBlock):
    """Sums of INT8 groups; see `kvant.hw.kvcache.variance.VarianceBlock`."""

    summary = "sum, sum of squares, extremes and exact variance of INT8 groups"
    fields = ("lanes", "group", "adder")
    held = ()

    def build(self, chosen: Config):
        """The component, anew at every call."""
        from kvant.hw.kvcache.variance import VarianceBlock as Component

        return Component(**self.parameters(chosen))

    def parameters(self, chosen: Config) -> Mapping[str, Any]:
        """Lanes, longest group, adder strategy."""
        return {name: getattr(chosen.cache, name) for name in self.fields}

    def facts(self, chosen: Config) -> Mapping[str, Any]:
        """Latency, throughput, stream orders and widths for the manifest."""
        from kvant.hw.kvcache.variance import variance_fields

        component = self.build(chosen)
        return {
            "latency": {"last transfer of a group to its result": component.latency},
            "throughput": {"elements per cycle": component.lanes, "transfers between groups without a bubble": 0},
            "streams": {
                "q": "ceil(n/lanes) transfers for each group of n elements, n from 1 to `group`; keep has a bit for "
                "each lane that holds an element, from lane 0 on without a gap; last ends the group",
                "y": "one transfer for each group, in order",
            },
            "widths": {name: Shape.cast(shape).width for name, shape in variance_fields(component.group).items()},
        }

    def vectors(self, chosen: Config, seed: int) -> Vectors:
        """Groups of random lengths, constant ones and all extremes among them."""
        from kvant.sim.kvcache import variance

        lanes, group = chosen.cache.lanes, chosen.cache.group
        groups = random_groups(BENCH_GROUPS, group, seed=seed)
        return Vectors(
            stimulus=variance.stimulus(groups, lanes=lanes),
            transfers={"y": {"data": variance.expected(golden_fields(groups), group=group)}},
            status={"error": 0},
        )

    def case(self, arrays: Mapping[str, np.ndarray], *, path: Path | None, overrides: Iterable[str]) -> Run:
        """*arrays*: see `ARRAYS`. `lanes` and `adder` of the configuration are read; a group is as long as a row."""
        from kvant.golden.kvcache.variance import LARGEST_GROUP
        from kvant.sim.kvcache import variance

        chosen = config.load(path, overrides)
        q = arrays.get("q")
        n = check_arrays(arrays, ARRAYS, group=chosen.cache.group)["n"]
        if n > LARGEST_GROUP:
            raise InputError(f"array q: {n} elements per group; legal is 1 to {LARGEST_GROUP}")
        given = scalar(arrays, "group")
        if given is not None and given != n:
            raise InputError(f"array group = {given}: legal is {n}, the length of the rows of q")
        lanes = chosen.cache.lanes

        def golden() -> dict[str, np.ndarray]:
            fields = golden_fields(q)
            return {name: np.array(fields[name], np.int64) for name in variance.OUTPUTS}

        return Run(
            run=partial(variance.run, q, lanes=lanes, adder=chosen.cache.adder),
            golden=golden,
            extra=shape_arrays(n, lanes),
        )


BLOCK = VarianceBlock()


def golden_fields(groups: Sequence[np.ndarray]) -> dict[str, list[int]]:
    """All fields of the block's results for *groups*, i8 [n] each, from the golden model."""
    from kvant.golden.kvcache.variance import GroupSums, group_sums

    sums = [group_sums(group, "q") for group in groups]
    columns = {name: [int(getattr(one, name)) for one in sums] for name in GroupSums._fields}
    return columns | {"count": [len(group) for group in groups]}


def random_groups(count: int, longest: int, *, seed: int) -> list[np.ndarray]:
    """Groups of random lengths up to *longest*: extremes, constant, constant but for one element, narrow, any."""
    rng = np.random.default_rng(seed)
    groups = []
    for index in range(count):
        n = longest if index < 5 else int(rng.integers(1, longest + 1))
        level = int(rng.choice([-128, 127, 0, 1, -1, int(rng.integers(-127, 127))]))
        group = np.full(n, level, np.int8)
        if index % 5 == 1:
            group[int(rng.integers(n))] = level + 1 if level < 127 else level - 1
        elif index % 5 == 2:
            group = rng.choice([-128, 127], n).astype(np.int8)
        elif index % 5 >= 3:
            width = int(rng.choice([2, 16, 128]))
            group = rng.integers(-width, width, n).astype(np.int8)
        groups.append(group)
    return groups
