"""Cycles and bytes of attention over caches of several formats, by length of the context, in the compiled RTL.

``python bench/attention_formats.py [--tokens T ...] [--formats mant int8 pq4 pq2] [--queries Q] [--plot FILE.png]
[--set FIELD=VALUE ...]``

For each format and context: cycles between the outputs of two commands behind each other, each of Q queries of one KV
head over a full cache; bytes that such a command reads; and the cycles that these bytes take at the port's width, which
no engine can beat. M-ANT and INT8 caches hold random groups. Product-quantised histories are coded by the RTL, which
takes most of the time, and read as `kvant run` does: decoded up to ``decode_tokens``, else by tables.
"""

import argparse
from contextlib import closing
from pathlib import Path

import numpy as np

from kvant import config, plots, pq
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.pq.parameters import PqParameters
from kvant.sim.attention.contents import Contents, Int8Rows, MantValues, packed_keys, packed_windows
from kvant.sim.compiled.attention import CompiledEngine
from kvant.sim.compiled.pq import CompiledPq

TOKENS = [512, 1024, 2048, 4096]
FORMATS = ["mant", "int8", "pq4", "pq2"]
QUERIES = 3
COMMANDS = 3
"""Commands behind a first one, over which cycles are averaged."""

SEED = 0
DECODED = 256
SUBSPACES = {"pq4": 2, "pq2": 4}


def random_contents(p: AttentionParameters, rng: np.random.Generator, kind: str, tokens: int) -> Contents:
    """A cache of random groups."""

    def scales(*shape: int) -> np.ndarray:
        return (0.005 + 0.005 * rng.random(shape)).astype(np.float16)

    def rows(count: int) -> Int8Rows:
        q = rng.integers(-127, 128, (count, p.head_dim)).astype(np.int8)
        return Int8Rows(q, scales(count, p.head_groups))

    if kind == "int8":
        return Contents(tokens, rows(tokens), rows(tokens))
    codes = rng.integers(0, 16, (2, tokens, p.head_dim)).astype(np.uint8)
    coefficients = rng.integers(0, 100, (2, tokens, p.head_dim)).astype(np.uint8)
    windows = tokens // p.group
    keys = packed_keys(p, codes[0], scales(tokens, p.head_groups), coefficients[0, :, : p.head_groups], rows(0))
    pages = packed_windows(p, codes[1, : windows * p.group], scales(windows, p.head_dim), coefficients[1, :windows])
    staged = rng.integers(-127, 128, (tokens % p.group, p.head_dim)).astype(np.int8)
    return Contents(tokens, keys, MantValues(pages, staged, scales(p.head_dim), rows(0)))


def measure_engine(engine: CompiledEngine, kind: str, tokens: int) -> tuple[float, float]:
    """Cycles and bytes of a command."""
    p, rng = engine.p, np.random.default_rng(SEED)
    held = [random_contents(p, rng, kind, tokens)] * (1 + COMMANDS)
    queries = rng.standard_normal((len(held), p.queries, p.head_dim)).astype(np.float16)
    ends = [tokens] * p.queries
    _, first, _ = engine.attend(held[:1], queries[:1], ends)
    _, cycles, moved = engine.attend(held, queries, ends)
    return (cycles - first) / COMMANDS, moved / len(held)


def measure_pq(p: PqParameters, lengths: list[int]) -> dict[int, tuple[float, float]]:
    """Cycles and bytes of a command at each number of tokens."""
    rng, results = np.random.default_rng(SEED), {}
    with closing(CompiledPq(p, [pq.random_tables(p, seed=SEED)])) as block:
        for tokens in sorted(lengths):
            for _ in range(tokens - block.tokens):
                block.append(*rng.standard_normal((2, 1, p.head_dim)).astype(np.float16))
            queries = rng.standard_normal((1, (1 + COMMANDS) * p.q_parallel, p.head_dim)).astype(np.float16)
            _, first, _ = block.attend(queries[:, : p.q_parallel])
            _, cycles, moved = block.attend(queries)
            results[tokens] = (cycles - first) / COMMANDS, moved / (1 + COMMANDS)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    parser.add_argument("--queries", type=int, default=QUERIES)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="FIELD=VALUE")
    options = parser.parse_args()
    longest = max(options.tokens)
    sizes = [f"queries={options.queries}", f"q_parallel={options.queries}", f"decode_tokens={DECODED}", "recent=64"]
    chosen = config.load(None, [*sizes, f"capacity={-(-longest // 64) * 64}", "multiplier=dsp", *options.overrides])
    port = chosen.attention.port_bits // 8
    curves: dict[str, dict[int, tuple[float, float]]] = {}
    kinds = [name for name in options.formats if name not in SUBSPACES]
    if kinds:
        with closing(CompiledEngine(chosen.attention)) as engine:
            for name in kinds:
                curves[name] = {tokens: measure_engine(engine, name, tokens) for tokens in options.tokens}
    for name in options.formats:
        if name in SUBSPACES:
            p = chosen.pq.model_copy(update={"subspace": SUBSPACES[name], "heads": 1})
            curves[name] = measure_pq(p, options.tokens)
    print(f"{'format':8} {'tokens':>7} {'cycles':>9} {'bytes':>9} {'bound':>9}")
    for name, points in curves.items():
        for tokens, (cycles, moved) in points.items():
            print(f"{name:8} {tokens:7} {cycles:9,.0f} {moved:9,.0f} {moved / port:9,.0f}")
    if options.plot is not None:
        plots.context_figure(options.plot, curves, port_bytes=port, queries=options.queries)


if __name__ == "__main__":
    main()
