"""What golden caches and linear layers need to know of a model of transformers, from text run through it."""

from collections.abc import Callable, Iterator, Sequence
from inspect import signature

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from kvant.golden.kvcache.attention import to_port
from kvant.golden.kvcache.calibration import CacheCalibrator, CacheTables, KeysAndValues
from kvant.golden.linear.objective import second_moment
from kvant.golden.models.errors import ModelError

Progress = Callable[[int, int], None]
"""Called with windows done and windows in all."""


def calibrate_cache(
    model: PreTrainedModel,
    windows: Sequence[torch.Tensor],
    *,
    group: int = 64,
    sinks: int = 4,
    statistic: str = "moment",
    progress: Progress | None = None,
) -> CacheTables:
    """Tables of M-ANT caches. All keys and values of the text are held in fp16 meanwhile.

    Parameters
    ----------
    model : PreTrainedModel
    windows : sequence of i64 [T]
        Token numbers; windows as long as the use.
    group, sinks, statistic
        As `kvant.golden.kvcache.calibration.CacheCalibrator` takes them.
    progress : callable, optional
    """
    seen = [_keys_and_values(model, window) for window in _reported(windows, progress)]
    calibrator = CacheCalibrator(group=group, sinks=sinks, statistic=statistic)
    for layer in zip(*seen, strict=True):
        calibrator.add(layer)
    return calibrator.result()


def cache_argument(model: PreTrainedModel) -> str:
    """What the model's forward calls its cache: ``past_key_values``, or ``cache`` in later releases of transformers."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


@torch.no_grad()
def _keys_and_values(model: PreTrainedModel, window: torch.Tensor) -> list[KeysAndValues]:
    """What every layer cached of one window."""
    cache = DynamicCache()
    model(input_ids=window[None], use_cache=True, **{cache_argument(model): cache})
    found = []
    for number, layer in enumerate(cache.layers):
        observer = KeysAndValues()
        observer.keys, observer.values = (to_port(x[0].float().cpu()) for x in (layer.keys, layer.values))
        if not bool(layer.keys.isfinite().all() & layer.values.isfinite().all()):
            raise ModelError(f"layer {number}: keys or values of the calibration text are not finite")
        found.append(observer)
    return found


@torch.no_grad()
def input_moments(
    model: PreTrainedModel, windows: Sequence[torch.Tensor], *, group: int = 64, progress: Progress | None = None
) -> dict[str, torch.Tensor]:
    """Mean second moments of the inputs of all linear layers, f64 [ceil(K/G), G, G] by name of the layer.

    Parameters
    ----------
    model, windows, progress
        As in `calibrate_cache`.
    group : int
        G.
    """
    sums: dict[str, torch.Tensor] = {}

    def hook(name: str):
        def observe(_, inputs: tuple[torch.Tensor, ...]) -> None:
            sums[name] = sums.get(name, 0) + second_moment(inputs[0].float().flatten(0, -2), group)

        return observe

    handles = [
        layer.register_forward_pre_hook(hook(name))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    try:
        for window in _reported(windows, progress):
            model(input_ids=window[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    tokens = sum(len(window) for window in windows)
    return {name: total / tokens for name, total in sums.items()}


def _reported(windows: Sequence[torch.Tensor], progress: Progress | None) -> Iterator[torch.Tensor]:
    if not len(windows):
        raise ModelError("calibration text: no tokens")
    for number, window in enumerate(windows, 1):
        yield torch.as_tensor(window).long()
        if progress is not None:
            progress(number, len(windows))
