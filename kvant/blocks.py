"""The blocks that can be generated, each behind one small protocol."""

import importlib
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvant.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from amaranth.lib import wiring

    from kvant.config import Config
    from kvant.sim.streams import Stimulus

BLOCKS = {
    "linear": "kvant.linear:BLOCK",
    "variance": "kvant.variance:BLOCK",
    "kcache": "kvant.kcache:BLOCK",
    "vcache": "kvant.vcache:BLOCK",
    "pq": "kvant.pq:BLOCK",
    "attention": "kvant.attention:BLOCK",
    "top": "kvant.top:BLOCK",
}
"""Where each block is defined, as ``module:attribute``; imported only when used."""


@dataclass(frozen=True)
class Vectors:
    """What a generated bench plays and what it has to see.

    Parameters
    ----------
    stimulus : Stimulus
        Transfers of the input streams, numbers of transfers of the output streams, names of plain outputs.
    transfers : dict
        Of each output stream the list of values of each field, as the golden model gives them; a field may be left
        out, and is then not compared.
    status : dict
        Of each plain output of the stimulus the value at the end; one may be left out.
    """

    stimulus: "Stimulus"
    transfers: Mapping[str, Mapping[str, list[int]]]
    status: Mapping[str, int]


class Block(Protocol):
    """A hardware block of the product."""

    summary: str
    """One line."""

    fields: Collection[str]
    """Fields of the configuration that it reads."""

    held: Collection[str]
    """Fields of its input streams, as ``stream.field``, that keep their value over many transfers: the serial link of
    a board carries them once."""

    def build(self, config: "Config") -> "wiring.Component":
        """The component, anew at every call."""

    def parameters(self, config: "Config") -> Mapping[str, Any]:
        """The part of the configuration that the hardware depends on, as JSON can hold it."""

    def facts(self, config: "Config") -> Mapping[str, Any]:
        """For the manifest, as JSON can hold it.

        ``latency``: cycles by name; ``throughput``: in words or numbers by name; ``streams``: of each stream the
        order of its transfers in words; ``widths``: derived widths by name; ``memory``: layout of what it stores, if
        that is not the layout of weights.
        """

    def files(self, config: "Config", name: str) -> Mapping[str, str]:
        """Texts that a generated design called *name* comes with besides those of every block, by file name.

        A block without such files need not have this function.
        """

    def vectors(self, config: "Config", seed: int) -> Vectors:
        """A small random case with the results of the golden model."""

    def simulate(self, arrays: "dict[str, np.ndarray]", **options: Any) -> "dict[str, np.ndarray]":
        """A user's tensors through the simulated RTL, see `kvant.simulated.SimulatedBlock.simulate`."""


def get_block(name: str) -> Block:
    """The block called *name*.

    Raises
    ------
    InputError
        There is none.
    """
    if name not in BLOCKS:
        raise InputError(f"BLOCK = {name!r}: legal is one of {', '.join(BLOCKS)}")
    module, attribute = BLOCKS[name].split(":")
    return getattr(importlib.import_module(module), attribute)


def note_without_effect(name: str, stated: Collection[str]) -> None:
    """Say on stderr which of the fields that the user set the block called *name* does not read."""
    fields = sorted(set(stated) - {"preset"} - set(get_block(name).fields))
    if fields:
        print(f"kvant: note: {', '.join(fields)}: no effect on {name}", file=sys.stderr)
