"""Attention over a product-quantised cache through the simulated RTL: the scan alone, and whole commands of both modes.

``python bench/pq_attention.py [--tokens T ...] [--mode table|decode|both] [--commands N] [--set FIELD=VALUE ...]``

T tokens are coded (that is most of the run), then commands of each mode come behind each other, each with as many
queries as there are tables for. ``command``: cycles between the last outputs of two commands. ``port``: words of codes,
and of these and the codebooks, over the words that the port could have brought in the meantime. ``scan``, by tables
alone: words of codes over cycles, from the first word of the keys' codes to the last score, and of the values' codes
from first to last.
"""

import argparse
import time

import numpy as np

from kvant import config, pq
from kvant.hw.pq.attention import PqAttention
from kvant.hw.pq.parameters import PqParameters
from kvant.sim.pq import attention as sim
from kvant.sim.simulate import simulate

TOKENS = [64, 128, 256, 512]
COMMANDS = 4
SEED = 0


def measure(p: PqParameters, tokens: int, commands: int, modes: list[str]) -> tuple[float, list[dict[str, float]]]:
    """Cycles to code a row, and for each mode those of its last but one command, with others before and behind it."""
    rng = np.random.default_rng(SEED)
    length = tokens + p.sinks + p.recent
    k, v = (rng.standard_normal((length, p.head_dim)).astype(np.float16) for _ in range(2))
    q = rng.standard_normal((p.q_parallel, p.head_dim)).astype(np.float16)
    attends = [sim.Attend(q, tokens, decode=mode == "decode") for mode in modes for _ in range(commands)]
    stimulus = sim.stimulus(p, sim.sequence(k, v), attends, {0: pq.random_tables(p, seed=SEED)})
    trace = simulate(lambda: PqAttention(p), "pq", stimulus, design_key=("pq", p))
    words = sim.batch_words(p, tokens)
    ends = trace.cycles["out"][p.q_parallel * p.head_dim - 1 :: p.q_parallel * p.head_dim]
    seen = []
    for number, mode in enumerate(modes):
        chosen = commands * (number + 1) - 2
        history = trace.cycles["history"][2 * chosen * words :]
        keys, values = history[:words], history[words : 2 * words]
        command = ends[chosen] - ends[chosen - 1]
        mine = {"command": command, "codes": 2 * words / command, "port": 2 * (words + p.codebook_words) / command}
        if mode == "table":
            tabled = modes[: number + 1].count("table") * commands - 1  # the number among these of the one behind it
            scored = trace.cycles["scores"][tabled * sim.frames_of(p, tokens) - 1]
            mine |= {
                "keys": words / (scored - keys[0] + 1),
                "values": words / (values[-1] - values[0] + 1),
            }
        seen.append(mine)
    return (trace.cycles["codes"][-1] - trace.cycles["x"][0] + 1) / (2 * tokens), seen


def main():
    """Print a line for each number of tokens and mode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--mode", choices=[*pq.MODES, "both"], default="both")
    parser.add_argument("--commands", type=int, default=COMMANDS, help="of each mode, behind each other; at least 3")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    arguments = parser.parse_args()
    modes = list(pq.MODES) if arguments.mode == "both" else [arguments.mode]
    p = config.load(None, arguments.set).pq
    if "decode" in modes and not p.decode_tokens:
        p = p.model_copy(update={"decode_tokens": max(arguments.tokens)})
    p.check_pq()
    print(
        f"d = {p.head_dim}, M = {p.subspaces}, {p.nbits} bits, P = {p.lanes}, q_parallel = {p.q_parallel}, seed {SEED}"
    )
    print(
        "tokens    mode  cycles/command  per token and query  codes/port  with codebooks/port  scan of keys  of values"
    )
    for tokens in arguments.tokens:
        start = time.perf_counter()
        coding, measured = measure(p, tokens, arguments.commands, modes)
        for mode, seen in zip(modes, measured, strict=True):
            per_query = seen["command"] / tokens / p.q_parallel
            scan = f"  {seen['keys']:12.3f}  {seen['values']:9.3f}" if mode == "table" else ""
            print(
                f"{tokens:6}  {mode:>6}  {seen['command']:14}  {per_query:19.2f}  {seen['codes']:10.3f}  "
                f"{seen['port']:19.3f}{scan}",
                flush=True,
            )
        seconds = time.perf_counter() - start
        print(f"{tokens:6}  coding {coding:.1f} cycles/row, {seconds:.0f} seconds", flush=True)


if __name__ == "__main__":
    main()
