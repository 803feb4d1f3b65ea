"""Golden caches and linear layers for any Llama-like model of transformers.

    from kvant.golden.models.huggingface import GoldenCache, quantize_model

transformers is needed here, and nowhere else in the product.
"""

from importlib.util import find_spec

from packaging.version import Version

OLDEST = "5.0"
"""First release of transformers whose caches are made of layers as they are used here."""

_NEEDED = f"transformers {OLDEST} or newer is needed (pip install 'kvant[llm]')"

if find_spec("transformers") is None:
    raise ImportError(f"transformers: not installed; {_NEEDED}")

import transformers  # noqa: E402 - only where there is one

if Version(transformers.__version__) < Version(OLDEST):
    raise ImportError(f"transformers {transformers.__version__}: {_NEEDED}")

from kvant.golden.models.huggingface_cache import GoldenCache  # noqa: E402 - the version is checked first
from kvant.golden.models.huggingface_calibration import cache_argument, calibrate_cache, input_moments  # noqa: E402
from kvant.golden.models.huggingface_linear import QuantizedLinear, quantize_model  # noqa: E402

__all__ = ["GoldenCache", "QuantizedLinear", "cache_argument", "calibrate_cache", "input_moments", "quantize_model"]
