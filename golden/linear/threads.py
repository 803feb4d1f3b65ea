"""Threads for work that consists of many small operators."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

Run = Callable[[Callable, Iterable], list]
"""Applies a function to every item and returns the results in order."""


@contextmanager
def independent_threads() -> Iterator[Run]:
    """Within the context, items are worked on in as many threads as torch would use, each of which computes alone.

    Operators on pieces that fit a cache are short. Letting each of them meet at a barrier of torch's own threads costs
    more than it gains, and far more when other programs hold a core, since those threads wait by spinning. It
    also makes every result independent of the number of threads. torch's own number of threads is 1 meanwhile, for the
    whole process, and is restored afterwards.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield lambda work, items: list(pool.map(work, items))
    finally:
        torch.set_num_threads(threads)
