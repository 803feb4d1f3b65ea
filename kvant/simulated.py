"""A user's tensors through the simulated RTL of a block, held against the golden model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvant.errors import ComparisonError


class Case(Protocol):
    """Checked tensors on a built configuration."""

    def outputs(self, *, check: bool, **options: Any) -> dict[str, np.ndarray]:
        """See `SimulatedBlock.simulate`; *options* are its `simulator`, `stall`, `seed` and `waves`."""


@dataclass(frozen=True)
class Run:
    """A case of one run.

    Parameters
    ----------
    run : callable
        Takes `simulator`, `stall`, `seed` and `waves` of `kvant.sim.simulate.simulate`, gives the outputs of the RTL.
    golden : callable
        Gives those of the golden model: of all outputs or some, by name.
    extra : dict of arrays
        Results that are known without a run: shapes, tables as used.
    """

    run: Callable[..., dict[str, np.ndarray]]
    golden: Callable[[], Mapping[str, np.ndarray]]
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)

    def outputs(self, *, check: bool, **options: Any) -> dict[str, np.ndarray]:
        """Outputs of the RTL and what is known without it."""
        result = self.run(**options)
        if check:
            compare(self.golden(), result)
        return {**result, **self.extra}


class SimulatedBlock(ABC):
    """A block that takes a user's tensors."""

    @abstractmethod
    def case(self, arrays: Mapping[str, np.ndarray], *, path: Path | None, overrides: Iterable[str]) -> Case:
        """Check *arrays*, which replace the configuration's numbers; *path*, *overrides* as `kvant.config.load` has
        them.

        Raises
        ------
        InputError
            For an illegal array.
        """

    def simulate(
        self,
        arrays: Mapping[str, np.ndarray],
        *,
        path: Path | None = None,
        overrides: Iterable[str] = (),
        simulator: str = "verilator",
        stall: float = 0.0,
        seed: int = 0,
        waves: Path | None = None,
        check: bool = True,
    ) -> dict[str, np.ndarray]:
        """Run *arrays* through the simulated RTL.

        Parameters
        ----------
        arrays : dict
            See the block's `case`.
        path, overrides
            Configuration, see `kvant.config.load`.
        simulator, stall, seed, waves
            See `kvant.sim.simulate.simulate`.
        check : bool
            Compare the outputs with the golden model.

        Returns
        -------
        dict
            Outputs of the RTL, and what is known without it.

        Raises
        ------
        InputError
            For an illegal array.
        ComparisonError
            If an output differs from the golden model.
        """
        case = self.case(arrays, path=path, overrides=overrides)
        return case.outputs(check=check, simulator=simulator, stall=stall, seed=seed, waves=waves)


def shape_arrays(group: int, cols: int, rows: int = 1) -> dict[str, np.ndarray]:
    """0-d i64 ``group``, ``rows``, ``cols`` and ``lanes`` of a block; one row where the lanes stand side by side."""
    shape = {"group": group, "rows": rows, "cols": cols, "lanes": rows * cols}
    return {name: np.array(value, np.int64) for name, value in shape.items()}


def compare(golden: Mapping[str, np.ndarray], result: Mapping[str, np.ndarray]) -> int:
    """Hold the RTL's outputs against the golden model, bit for bit; returns how many values were compared.

    Raises
    ------
    ComparisonError
        Naming the first value that differs.
    """
    for name, expected in golden.items():
        bits = f"u{expected.itemsize}"
        differs = np.argwhere(result[name].view(bits) != expected.view(bits))
        if len(differs):
            index = tuple(differs[0].tolist())
            raise ComparisonError(
                f"{name}{list(index)} = {result[name][index]!r} in the RTL, {expected[index]!r} in the golden model "
                f"({len(differs)} of {expected.size} values differ)"
            )
    return sum(expected.size for expected in golden.values())
