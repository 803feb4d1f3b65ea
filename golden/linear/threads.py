"""Threads for work that consists of many small operators."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch


def in_threads(work: Callable, items: Iterable) -> list:
    """Results of *work* on every item, in as many threads as torch would use, each of which computes alone.

    Operators on pieces that fit a cache are short; letting each of them meet at a barrier of torch's own threads costs
    more than it gains, and far more when other programs hold a core. It also makes every result independent of
    the number of threads.
    """
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(work, items))
    finally:
        torch.set_num_threads(threads)  # the workers' setting also changed the default of threads to come
