"""Attention over a product-quantised cache through the simulated RTL: the scan alone, and whole commands.

``python bench/pq_attention.py [--tokens T ...] [--commands N] [--set FIELD=VALUE ...]``

T tokens are coded (that is most of the run), then commands come behind each other, each with as many queries as there
are tables for. ``scan``: codes per cycle over what the port brings, from the first word of the keys' codes to the last
score, and of the values' codes from first to last. ``command``: cycles between the last outputs of two commands.
``port``: the same ratio over whole commands, of the words of codes, and of these and the codebooks.
"""

import argparse
import time

import numpy as np

from kvant import config, pq
from kvant.hw.pq.attention import PqAttention
from kvant.hw.pq.parameters import PqParameters
from kvant.sim.pq import attention as sim
from kvant.sim.simulate import simulate

TOKENS = [128, 256, 512]
COMMANDS = 4
SEED = 0


def measure(p: PqParameters, tokens: int, commands: int) -> dict[str, float]:
    """Cycles and ratios of the last but one command, with others before and behind it."""
    rng = np.random.default_rng(SEED)
    length = tokens + p.sinks + p.recent
    k, v = (rng.standard_normal((length, p.head_dim)).astype(np.float16) for _ in range(2))
    q = rng.standard_normal((p.q_parallel, p.head_dim)).astype(np.float16)
    attends = [sim.Attend(q, tokens)] * commands
    stimulus = sim.stimulus(p, sim.sequence(k, v), attends, {0: pq.random_tables(p, seed=SEED)})
    trace = simulate(lambda: PqAttention(p), "pq", stimulus, design_key=("pq", p))
    words = sim.batch_words(p, tokens)
    chosen = commands - 2
    history = trace.cycles["history"][2 * chosen * words :]
    keys, values = history[:words], history[words : 2 * words]
    scored = trace.cycles["scores"][(chosen + 1) * sim.frames_of(p, tokens) - 1]
    ends = trace.cycles["out"][p.q_parallel * p.head_dim - 1 :: p.q_parallel * p.head_dim]
    command = ends[chosen] - ends[chosen - 1]
    return {
        "coding": (trace.cycles["codes"][-1] - trace.cycles["x"][0] + 1) / (2 * tokens),
        "keys": words / (scored - keys[0] + 1),
        "values": words / (values[-1] - values[0] + 1),
        "command": command,
        "codes": 2 * words / command,
        "port": 2 * (words + p.codebook_words) / command,
    }


def main():
    """Print a line for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--commands", type=int, default=COMMANDS, help="commands behind each other, at least 3")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    arguments = parser.parse_args()
    p = config.load(None, arguments.set).pq.check_pq()
    print(f"d = {p.head_dim}, M = {p.subspaces}, {p.nbits} bits, q_parallel = {p.q_parallel}, seed {SEED}")
    print(
        "tokens  coding, cycles/row  scan of keys  of values  cycles/command  per token and query  codes/port  "
        "with codebooks/port  seconds"
    )
    for tokens in arguments.tokens:
        start = time.perf_counter()
        seen = measure(p, tokens, arguments.commands)
        per_query = seen["command"] / tokens / p.q_parallel
        print(
            f"{tokens:6}  {seen['coding']:18.1f}  {seen['keys']:12.3f}  {seen['values']:9.3f}  {seen['command']:14}  "
            f"{per_query:19.2f}  {seen['codes']:10.3f}  {seen['port']:19.3f}  {time.perf_counter() - start:7.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
