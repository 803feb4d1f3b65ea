"""Kogge-Stone parallel-prefix adder."""

from kvant.hw.numeric.prefix_adders import Level, PrefixAdder


class KoggeStone(PrefixAdder):
    """Every place joins the span below it in every level: least depth and fan-out, for the most cells and wires.

    Interface, parameters and errors are those of `PrefixAdder`. Every level doubles the spans of all places. Source:
    P. M. Kogge and H. S. Stone, "A Parallel Algorithm for the Efficient Solution of a General Class of Recurrence
    Equations", IEEE Trans. Computers C-22 (1973).
    """

    @property
    def spans(self) -> list[int]:
        """Distance that each prefix level reaches: 1, 2, 4, ... until every carry is known."""
        return [1 << level for level in range(self.width.bit_length())]

    @property
    def network(self) -> list[Level]:
        """All places that do not reach the bottom yet."""
        return [{place: place - span for place in range(span, self.places)} for span in self.spans]
