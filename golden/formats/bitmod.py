"""BitMoD: a 4-bit float whose second zero is a value that every group chooses (Chen et al., HPCA 2025, section III).

E2M1 has a positive and a negative zero. BitMoD gives one of the sixteen codes to a special value: 5 or -5, which
refines the gap between 4 and 6 ("extra resolution"), or 8 or -8, which stretches one side ("extra asymmetry"). A group
stores which of the four it takes in two bits. The article quantises the scales of a row to INT8 once more; here they
are fp16, as those of all other formats.
"""

from kvant.golden.formats.baselines import LevelTable, symmetric

E2M1_MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)

SPECIAL_VALUES = (5, -5, 8, -8)
"""What the sixteenth code may stand for."""

BITMOD = LevelTable("bitmod", [sorted([*symmetric(E2M1_MAGNITUDES), special]) for special in SPECIAL_VALUES])
