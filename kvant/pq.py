"""Product-quantised attention as a block of the product: generated, simulated with a user's tensors, compared."""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvant import cache_arrays, config
from kvant.blocks import Vectors
from kvant.config import Config
from kvant.errors import InputError
from kvant.hw.parameters import ParameterError
from kvant.hw.pq.parameters import PqParameters
from kvant.simulated import Run, SimulatedBlock, shape_arrays
from kvant.tensors import ArraySpec, check_arrays, scalar

ARRAYS = [
    ArraySpec("k", "float16", ("T", "d"), required=True),
    ArraySpec("v", "float16", ("T", "d")),
    ArraySpec("q", "float16", ("B", "d"), required=True),
    ArraySpec("codebook_k", "int8", ("M", "C", "d/M")),
    ArraySpec("codebook_k_scale", "float16", ("1",)),
    ArraySpec("codebook_v", "int8", ("M_v", "C_v", "d/M_v")),
    ArraySpec("codebook_v_scale", "float16", ("1",)),
    ArraySpec("mean", "float16", ("d",)),
    *(ArraySpec(name, "integer") for name in ("group", "sinks", "recent")),
    ArraySpec("mode", "str"),
]
"""What ``kvant simulate pq`` takes: keys, values and queries of one head, codebooks, a mean, a mode."""

MODES = ("table", "decode")
"""What becomes of codes: look-ups in tables and additions to bins, or INT8 rows."""

NUMBER_ARRAYS = ("group", "sinks", "recent")
"""Fields of the configuration that may be given as arrays."""

BENCH_TOKENS = 3
"""Tokens of a generated bench that are coded at its end, behind a batch."""

TRAINING_SEED = 0
"""Seed of codebooks that are trained: the one of the pauses changes no result."""

BENCH_WINDOW = 256
"""Most recent tokens of a generated bench's sequence; with a longer window nothing of it is coded."""


class PqBlock(SimulatedBlock):
    """Keys and values to codes, attention by table look-up; see `kvant.hw.pq.attention.PqAttention`."""

    summary = "keys and values to product-quantisation codes, attention by look-up tables and bins"
    fields = tuple(PqParameters.model_fields)
    held = ()

    def build(self, chosen: Config):
        """The component, anew at every call."""
        from kvant.hw.pq.attention import PqAttention

        return PqAttention(chosen.pq)

    def parameters(self, chosen: Config) -> Mapping[str, Any]:
        """The fields of `PqParameters`."""
        return chosen.pq.model_dump()

    def facts(self, chosen: Config) -> Mapping[str, Any]:
        """Throughput, stream orders, memory layout and widths for the manifest."""
        p = chosen.pq.check_pq()
        return {
            "latency": {},
            "throughput": {
                "elements per cycle at x and q": p.lanes,
                "codes looked up per cycle": p.word_codes,
                "cycles of a pass over a codebook, per token of a full batch": p.codebook_words
                * (p.batch_tokens + 1)
                // p.batch_tokens,
                "cycles of a pass over a codebook, per table": p.codebook_words,
                "cycles of a pass over a codebook, per read-out": 2 * p.codebook_words,
            },
            "streams": {
                "x": "rows of head_dim fp16 elements, row_transfers transfers each, keys and values of any heads in "
                "turn; surplus lanes of the last one are ignored; user is read in a row's first transfer: start (first "
                "row of a sequence), flush (code all rows but the recent ones), store (0 keys, 1 values), head",
                "cfg": "tables of a head, while no row of it is under way: kind 2 mean (if centred), 4 end of its "
                "sequence, 5 and 6 fp16 scale of the codebook of its keys and values",
                "encode_codebook": "the codebook of the head and store, for each batch that is coded",
                "codes": "words of codes; user: address in words of the port within the codes of head and store",
                "cmd": "a batch of queries: coded tokens to read from memory (history), queries (count), head, whether "
                f"to mix values, whether to decode the history to rows (up to {p.decode_tokens} tokens)",
                "q": "fp16 queries, row_transfers transfers each, count for every command",
                "codebook_k": "for each command with a history: the codebook of the keys",
                "codebook_v": "for each command with a history that mixes values: the codebook of the values",
                "history": "for each command with a history: its words of codes of the keys, then of the values",
                "scores": "integer scores of the coded tokens, for each command that does not decode them: for each "
                "frame, token by token, query by query",
                "out": "fp32 outputs, element by element, query by query",
            },
            "memory": {
                "codebook": f"{p.codebook_words} words of {p.port_bits} bits: for each of {p.slices} slices of "
                f"{p.slice_bytes} channels, for each of {p.centroids} centroids, its INT8 elements of these channels, "
                "the first in the lowest byte",
                "codes": f"frames of {p.frame} tokens and {p.frame_words} words of {p.word_codes} codes of {p.nbits} "
                f"bits without gaps, the first in the lowest bits; word k of a frame: for each token, for each j below "
                f"{p.run}, the code of sub-space {p.run}*k + j; {p.chunk_tokens} tokens are {p.chunk_words} words of "
                f"{p.port_bits} bits",
                "bytes": {
                    "codebook": p.codebook_words * p.port_bytes,
                    "codes of a token": p.subspaces * p.nbits / 8,
                },
            },
            "widths": {"table": p.lut_width, "score": p.score_width, "bin": p.bin_width},
        }

    def vectors(self, chosen: Config, seed: int) -> Vectors:
        """A random sequence of one head that has some coded tokens, and a batch of queries."""
        from kvant.sim.pq import attention as sim

        p = chosen.pq.check_pq()
        rng = np.random.default_rng(seed)
        tokens = p.sinks + min(p.recent, BENCH_WINDOW) + p.batch_tokens + BENCH_TOKENS
        k, v, q = (rng.standard_normal((n, p.head_dim)).astype(np.float16) for n in (tokens, tokens, p.q_parallel))
        tables = random_tables(p, seed=seed)
        golden = golden_outputs(p, k, v, q, tables)
        rows, history = sim.sequence(k, v), sim.history_of(p, tokens)
        coded = sim.batches(p, rows)
        codes = [
            golden["v_codes" if batch.store else "k_codes"][p.sinks + batch.first :][: batch.count] for batch in coded
        ]
        attends = [sim.Attend(q, history)]
        return Vectors(
            stimulus=sim.stimulus(p, rows, attends, {0: tables}, codes=codes),
            transfers=sim.expected(p, coded, codes, golden, history),
            status={"nonfinite": 0, "error": 0, "full": 0, "busy": 0},
        )

    def case(self, arrays: Mapping[str, np.ndarray], *, path: Path | None, overrides: Iterable[str]) -> Run:
        """*arrays*: see `ARRAYS`; codebooks replace the configuration's `subspace` and `nbits`. Codebooks that are not
        given are trained on the keys, or values, themselves; those used are among the results. With a mean, keys are
        centred. Without values there are scores alone. A `mode` "decode" answers the queries from decoded rows; then
        `decode_tokens` is the number of tokens if the configuration has none.

        Raises
        ------
        InputError
            For an illegal array, or more tokens than the cache holds, or decodes.
        """
        from kvant.sim.pq import attention as sim

        lengths = check_arrays(arrays, ARRAYS, group=1)
        mode = _mode(arrays)
        chosen = _configuration(arrays, path, overrides, lengths)
        p = chosen.pq
        history = sim.history_of(p, lengths["T"])
        if history > p.tokens:
            raise InputError(
                f"array k: {lengths['T']} tokens; legal is up to {p.tokens + p.sinks + p.recent} "
                f"(capacity = {p.tokens}, {p.sinks} sinks, {p.recent} recent)"
            )
        if mode == "decode":
            p = _with_decoder(p, history)
        tables = _tables(p, arrays)
        k, v, q = arrays["k"], arrays.get("v"), arrays["q"]
        stores = ("k",) if v is None else ("k", "v")
        books = {f"codebook_{name}": tables.entries[store] for store, name in enumerate(stores)}
        books |= {f"codebook_{name}_scale": tables.scales[store].reshape(1) for store, name in enumerate(stores)}
        return Run(
            run=partial(sim.run, p, k, v, q, tables, mode=mode),
            golden=partial(golden_outputs, p, k, v, q, tables, mode=mode),
            extra=books | shape_arrays(p.group, p.lanes),
        )


BLOCK = PqBlock()


def _mode(arrays: Mapping[str, np.ndarray]) -> str:
    """The mode among *arrays*; "table" if there is none."""
    mode = str(arrays.get("mode", MODES[0]))
    if mode not in MODES:
        raise InputError(f"array mode: {mode}; legal is one of {', '.join(MODES)}")
    return mode


def _with_decoder(p: PqParameters, history: int) -> PqParameters:
    """These parameters with a decoder that is long enough, if they have none; a refusal if theirs is too short."""
    if not p.decode_tokens:
        return p.model_copy(update={"decode_tokens": max(1, history)})
    if p.decode_tokens < history:
        raise InputError(f"decode_tokens = {p.decode_tokens}: legal with {history} coded tokens is {history} or more")
    return p


def _configuration(
    arrays: dict[str, np.ndarray], path: Path | None, overrides: Iterable[str], lengths: Mapping[str, int]
) -> Config:
    """The configuration with what the arrays say of it.

    Raises
    ------
    InputError
        Codebooks without their scale or without values, of different shapes, or of illegal ones.
    """
    given = {name: value for name in NUMBER_ARRAYS if (value := scalar(arrays, name)) is not None}
    given["head_dim"] = lengths["d"]
    if "mean" in arrays:
        given["centred"] = True
    for store in ("k", "v"):
        names = (f"codebook_{store}", f"codebook_{store}_scale")
        for name, other in (names, names[::-1]):
            if name in arrays and other not in arrays:
                raise InputError(f"array {name}: given without {other}; legal are both or none")
        if names[0] in arrays and store not in arrays:
            raise InputError(f"array {names[0]}: given without {store}; legal are both, or neither")
    books = {name: arrays[name] for name in ("codebook_k", "codebook_v") if name in arrays}
    if len({book.shape for book in books.values()}) > 1:
        raise InputError(f"array codebook_v: {books['codebook_v'].shape}; legal is {books['codebook_k'].shape}")
    for name, book in books.items():
        subspaces, centroids, dimensions = book.shape
        nbits = centroids.bit_length() - 1
        if subspaces * dimensions != lengths["d"] or dimensions not in (1, 2, 4, 8):
            raise InputError(
                f"array {name}: {book.shape}; legal is [M, C, d/M] with d/M in 1, 2, 4, 8 and d = {lengths['d']}"
            )
        if centroids != 1 << nbits or not 4 <= nbits <= 8:
            raise InputError(f"array {name}: {centroids} centroids; legal is 16, 32, 64, 128 or 256")
        given |= {"subspace": dimensions, "nbits": nbits}
    chosen = config.load(path, overrides, arrays=given)
    try:
        chosen.pq.check_pq()
    except ParameterError as error:
        raise InputError(str(error)) from None
    cache_arrays.check_finite(arrays, "mean")
    for store in ("k", "v"):
        cache_arrays.check_finite(arrays, f"codebook_{store}_scale", least=0)
    return chosen


def _tables(p: PqParameters, arrays: Mapping[str, np.ndarray]):
    """Codebooks given or trained, and the mean."""
    import torch

    from kvant.golden.numeric.int8 import port_rule
    from kvant.golden.pq.train import train_codebooks
    from kvant.sim.pq.attention import Tables

    mean = arrays.get("mean")
    if p.centred and mean is None:
        mean = np.zeros(p.head_dim, np.float16)
    entries, scales = [], []
    for store in ("k", "v"):
        name = f"codebook_{store}"
        if name in arrays:
            entries.append(arrays[name])
            scales.append(arrays[f"{name}_scale"][0])
        elif store in arrays:
            samples = port_rule(torch.from_numpy(arrays[store]))
            centre = None if mean is None or store == "v" else torch.from_numpy(mean)
            book = train_codebooks(
                samples, subspace=p.subspace, nbits=p.nbits, mean=centre, seed=TRAINING_SEED, name=store
            )
            entries.append(book.entries.numpy())
            scales.append(np.float16(book.scale.numpy()))
        else:
            entries.append(np.zeros((p.subspaces, p.centroids, p.subspace), np.int8))
            scales.append(np.float16(0))
    return Tables(tuple(entries), tuple(scales), mean)


def random_tables(p: PqParameters, *, seed: int):
    """Codebooks of random centroids, the lowest INT8 number among them, and a mean where keys are centred."""
    from kvant.sim.pq.attention import Tables

    rng = np.random.default_rng((seed, 1))
    shape = (p.subspaces, p.centroids, p.subspace)
    entries = tuple(rng.integers(-128, 128, shape).astype(np.int8) for _ in range(2))
    mean = rng.standard_normal(p.head_dim).astype(np.float16) if p.centred else None
    return Tables(entries, (np.float16(0.02), np.float16(0.03)), mean)


def golden_outputs(
    p: PqParameters, k: np.ndarray, v: np.ndarray | None, q: np.ndarray, tables, *, mode: str = "table"
) -> dict[str, np.ndarray]:
    """The arrays of `kvant.sim.pq.attention.run` from the golden model."""
    from kvant.golden.pq.cache import pq_cache
    from kvant.golden.pq.codebook import Codebook
    from kvant.golden.pq.decode import decode_attention
    from kvant.golden.pq.scores import quantize_query

    options = {"group": p.group, "sinks": p.sinks, "recent": p.recent}
    books = [Codebook.of(*book) for book in zip(tables.entries, map(np.asarray, tables.scales), strict=True)]
    keys = pq_cache(k, books[0], mean=tables.mean, **options)
    outputs = {"k_codes": keys.codes.numpy()}
    if v is None:
        queries = quantize_query(q)
        scores, nonfinite = keys.scores(queries.q), keys.nonfinite or queries.nonfinite
    else:
        values = pq_cache(v, books[1], **options)
        out, scores, nonfinite = decode_attention(q, keys, values, mode=mode)
        nonfinite |= keys.nonfinite or values.nonfinite
        outputs |= {"v_codes": values.codes.numpy(), "out": out.numpy()}
    return outputs | {"scores": scores.numpy(), "nonfinite": np.array(nonfinite, np.int64)}
