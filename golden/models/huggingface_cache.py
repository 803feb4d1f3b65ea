"""A cache for models of transformers that gives their attention what a hardware cache would hold.

Keys and values of a call are appended to the rows so far. What `update` returns is the cache as the query of the call's
*last* token meets it (`kvant.golden.kvcache.attention.Store.latest`): sinks, full windows in their final form, the open
window as staged, or codes and recent rows. In a call of one token that is exactly what the query meets in hardware. In
a call of several, the prompt, all its queries meet this one state, behind a causal mask: rows are in the form that they
have when the call ends, which for a query in the middle of a window is the form of a few tokens later.

The exact rows stay here too, since the golden model makes its bits anew in every call; what hardware stores is told by
`GoldenCache.bits_per_element`.
"""

from collections.abc import Sequence

import torch
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from kvant.golden.errors import TensorError
from kvant.golden.kvcache.attention import Store
from kvant.golden.kvcache.formats import CACHE_FORMATS, CacheFormat, CacheSettings
from kvant.golden.kvcache.maps import apply, inverse
from kvant.golden.models.errors import ModelError

_LAYER_TYPES = ("full_attention", "sliding_attention")


class GoldenCache(Cache):
    """Keys and values in a cache format of the golden model: what a model's ``past_key_values`` or ``cache`` takes.

    Parameters
    ----------
    config : PreTrainedConfig
        That of the model.
    format : str or CacheFormat
        One of `CACHE_FORMATS` or its name. A format whose own attention is in integers is cached in the same bits; the
        attention over them is the model's.
    settings : CacheSettings, optional
        Group, sinks, recent tokens, tables and codebooks. Its `prefill` is not used: the first call of a sequence is
        the prompt's.
    attention_mask : integer or bool [B, T], optional
        0 where a sequence is padded, as the tokenizer gives it; needed for more than one sequence. Padding is not
        cached: positions in a cache are those of real tokens, so every sequence has the bits of a run of its own.

    Raises
    ------
    TensorError
        An unknown format, one whose tables or codebooks are missing or of another model, a mask that is none.
    ModelError
        A model with layers other than attention, or whose attention is not shift-invariant under a format that takes
        the mean out of its keys.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        format: str | CacheFormat,
        settings: CacheSettings | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
    ):
        config = config.get_text_config(decoder=True)
        if isinstance(format, str):
            if format not in CACHE_FORMATS:
                raise TensorError(f"format = {format!r}: legal are {', '.join(CACHE_FORMATS)}")
            format = CACHE_FORMATS[format]
        settings = settings or CacheSettings()
        stores = format.stores(settings)
        _check_model(config, stores)
        maps = format.maps(settings) or (None, None)
        pairs = [_Mapped(*pair) for pair in zip(stores, maps, strict=True)]
        real = None if attention_mask is None else _check_mask(attention_mask)
        count = config.num_hidden_layers
        super().__init__(layers=[_Layer(number, pairs, real) for number in range(count)])
        self._footprints = format.footprint(settings, _head_dim(config))

    @property
    def bits_per_element(self) -> float:
        """Bits per element that hardware stores for the longest sequence so far, everything counted: codes, scales,
        coefficients, sinks, the open window, codebooks; the mean of keys and values."""
        tokens = self.layers[0].cached_tokens
        return sum(footprint.at(tokens) for footprint in self._footprints) / 2 if tokens else 0.0


class _Mapped:
    """A store behind a map f16 [L, H, d, d], if there is one: rows pass through it, and what is read back again."""

    def __init__(self, store: Store, matrix: torch.Tensor | None):
        self._store, self._map = store, matrix
        self._inverse = None if matrix is None else inverse(matrix)

    def latest(self, layer: int, x: torch.Tensor, prefill: int) -> torch.Tensor:
        """Rows f32 [H, T, d] of a sequence whose first call has *prefill* tokens, as its newest query meets them."""
        store = self._store.begun(prefill)
        if self._map is None:
            return store.latest(layer, x)
        return apply(self._inverse[layer], store.latest(layer, apply(self._map[layer], x)))


class _Layer(DynamicLayer):
    """Exact rows of a layer as the base class keeps them, read through the stores.

    Parameters
    ----------
    number : int
    stores : pair of _Mapped
        Of keys and of values.
    mask : bool [B, T], optional
        Real tokens.
    """

    def __init__(self, number: int, stores: Sequence[_Mapped], mask: torch.Tensor | None):
        super().__init__()
        self._number, self._stores, self._given = number, stores, mask
        self._clear()

    def _clear(self) -> None:
        self._mask = self._given
        self._real: torch.Tensor | None = None
        """bool [B, T]: which of the rows so far are no padding."""
        self._prefill: torch.Tensor | None = None
        """i64 [B]: tokens of each sequence's first call."""

    @property
    def cached_tokens(self) -> int:
        """Tokens of the longest sequence, padding not counted."""
        return 0 if self._real is None else int(self._real.sum(1).max())

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        self._extend(*key_states.shape[::2])
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return self._read(self._stores[0], keys), self._read(self._stores[1], values)

    def _extend(self, batch: int, tokens: int) -> None:
        """Note which of the next *tokens* columns are real."""
        known = self.get_seq_length()
        if self._real is None:
            if self._mask is None and batch > 1:
                raise TensorError(
                    f"attention_mask: missing for {batch} sequences; legal is the tokenizer's, ones without padding"
                )
            if self._mask is not None:
                if batch % len(self._mask):
                    raise TensorError(f"attention_mask: {len(self._mask)} sequences; the model runs {batch}")
                # beams and several answers of a prompt are copies that stand together
                self._mask = self._mask.repeat_interleave(batch // len(self._mask), 0)
            self._real = torch.ones(batch, 0, dtype=torch.bool)
            self._prefill = torch.zeros(batch, dtype=torch.int64)
        new = torch.ones(batch, tokens, dtype=torch.bool)
        if self._mask is not None:
            part = self._mask[:, known : known + tokens]
            new[:, : part.shape[1]] = part
        self._real = torch.cat((self._real, new), 1)
        self._prefill = torch.where(self._prefill == 0, new.sum(1), self._prefill)

    def _read(self, store: _Mapped, rows: torch.Tensor) -> torch.Tensor:
        """Rows [B, H, T, d] as the newest token's queries meet them; 0 where there is padding."""
        held = torch.zeros_like(rows)
        for number, (sequence, real, prefill) in enumerate(zip(rows, self._real, self._prefill, strict=True)):
            if prefill:
                places = real.nonzero().flatten().to(rows.device)
                x = sequence[:, places].detach().float().cpu()
                found = store.latest(self._number, x, int(prefill))
                held[number, :, places] = found.to(rows.device, rows.dtype)
        return held

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self._clear()

    def crop(self, *args, **kwargs) -> None:
        super().crop(*args, **kwargs)
        if self._real is not None:
            self._real = self._real[:, : self.get_seq_length()]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._take(lambda x: x.index_select(0, beam_idx.cpu()))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._take(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._take(lambda x: x[indices.cpu()])

    def _take(self, choose) -> None:
        """Choose sequences."""
        self._mask, self._real, self._prefill = (
            None if x is None else choose(x) for x in (self._mask, self._real, self._prefill)
        )


def _head_dim(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _check_model(config: PreTrainedConfig, stores: tuple[Store, Store]) -> None:
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in _LAYER_TYPES:
            raise ModelError(f"layer_types: {kind!r}; legal are {', '.join(_LAYER_TYPES)}")
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    shape = (config.num_hidden_layers, heads, _head_dim(config))
    for store, rows in zip(stores, ("keys", "values"), strict=True):
        for name in ("mean", "floor"):
            vector = getattr(store, name, None)
            if vector is not None and tuple(vector.shape) != shape:
                raise TensorError(f"{name} of {rows}: shape {tuple(vector.shape)}; the model's is {shape}")
    uneven = getattr(config, "attn_logit_softcapping", None) is not None or config.model_type == "gpt_oss"
    if uneven and getattr(stores[0], "mean", None) is not None:
        raise ModelError(
            f"{config.model_type}: its softmax sees a shift of all scores, which centred keys need it not to; legal is "
            "a format that is not centred"
        )


def _check_mask(mask: torch.Tensor) -> torch.Tensor:
    if mask.ndim != 2 or not bool(((mask == 0) | (mask == 1)).all()):
        raise TensorError(f"attention_mask: shape {tuple(mask.shape)}; legal is [sequences, tokens] of 0 and 1")
    return mask.bool().cpu()
