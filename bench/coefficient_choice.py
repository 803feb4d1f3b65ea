"""What choosing coefficients by thresholds costs beside the error-optimal choice, layer by layer, on held-out text.

    python bench/coefficient_choice.py smollm2 --calibrate calibration.txt --text test.txt
    python bench/coefficient_choice.py smollm2 --calibrate calibration.txt --text test.txt --statistic moment

Tables are fitted to the calibration text. On the other text every group (or window, where the coefficient is shared) is
quantised exactly as the cache does it, once with the coefficient that its table gives and once with each of 0..127 and
255. The ratio is the sum of squared errors, against the exact fp16 rows, of the first over the sum of the least ones.
"""

import argparse
import functools
import json
from pathlib import Path

from kvant.golden.kvcache.calibration import (
    ALL_COEFFICIENTS,
    KINDS,
    USUAL_COEFFICIENTS,
    CacheCalibrator,
    CacheTables,
    KeysAndValues,
    candidate_errors,
    choice_error,
)
from kvant.golden.linear.threads import independent_threads
from kvant.golden.models.calibration import calibration_windows, observe_layers
from kvant.golden.models.checkpoint import open_model


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="what `kvant quantize` takes")
    parser.add_argument("--calibrate", type=Path, required=True, metavar="TEXT")
    parser.add_argument("--text", type=Path, required=True, help="held-out text")
    parser.add_argument("--tokens", type=int, default=16384, help="calibration tokens")
    parser.add_argument("--held-out", type=int, default=4096, help="tokens of the held-out text")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--statistic", choices=("variance", "moment"), nargs="+", default=["variance", "moment"])
    parser.add_argument("--usual", action="store_true", help="tables and optimum of 0, 5, ..., 120 and 255 only")
    parser.add_argument("--json", type=Path, help="keep the figures here")
    return parser.parse_args()


def measure(seen: KeysAndValues, layer: int, found: dict[str, CacheTables], candidates: tuple[int, ...]) -> dict:
    """Error of the choice and the least one on one window, by kind and statistic."""
    figures = {}
    any_tables = next(iter(found.values()))  # means and floors do not depend on the statistic
    for name, kind in KINDS.items():
        statistics, errors = candidate_errors(
            getattr(seen, kind.rows),
            kind,
            group=any_tables.group,
            mean=any_tables.key_mean[layer] if kind.rows == "keys" else None,
            floor=(any_tables.key_floor if kind.rows == "keys" else any_tables.value_floor)[layer],
            sinks=any_tables.sinks,
            candidates=candidates,
        )
        for statistic, tables in found.items():
            figures[name, statistic] = choice_error(statistics, errors, kind, tables.layers(name)[layer], candidates)
    return figures


def main() -> None:
    arguments = parse()
    checkpoint = open_model(arguments.model)
    candidates = USUAL_COEFFICIENTS if arguments.usual else ALL_COEFFICIENTS
    texts = [
        calibration_windows(checkpoint, path.read_text(encoding="utf-8"), tokens, arguments.window)
        for path, tokens in ((arguments.calibrate, arguments.tokens), (arguments.text, arguments.held_out))
    ]
    calibrators = {
        statistic: CacheCalibrator(
            group=arguments.group, sinks=arguments.sinks, statistic=statistic, candidates=candidates
        )
        for statistic in arguments.statistic
    }
    columns = [(kind, statistic) for kind in KINDS for statistic in arguments.statistic]
    print("layer  " + "  ".join(f"{kind}/{statistic}" for kind, statistic in columns))
    figures: dict[str, list[tuple[float, float]]] = {f"{kind}/{statistic}": [] for kind, statistic in columns}
    # both texts run through each layer together, so that one layer is in memory at a time
    for layer, observers in observe_layers(checkpoint, texts[0] + texts[1], CacheCalibrator.observer):
        seen, unseen = observers[: len(texts[0])], observers[len(texts[0]) :]
        for calibrator in calibrators.values():
            calibrator.add(seen)
        results = {statistic: calibrator.result() for statistic, calibrator in calibrators.items()}
        with independent_threads() as run:
            errors = run(functools.partial(measure, layer=layer, found=results, candidates=candidates), unseen)
        line = []
        for kind, statistic in columns:
            chosen, least = (sum(e[kind, statistic][part] for e in errors) for part in (0, 1))
            figures[f"{kind}/{statistic}"].append((chosen, least))
            line.append(f"{chosen / least:.3f}".rjust(len(kind) + len(statistic) + 1))
        print(f"{layer:5}  " + "  ".join(line), flush=True)
    totals = [[sum(part) for part in zip(*figures[f"{k}/{s}"], strict=True)] for k, s in columns]
    cells = [f"{c / o:.3f}".rjust(len(k) + len(s) + 1) for (k, s), (c, o) in zip(columns, totals, strict=True)]
    print("  all  " + "  ".join(cells))
    if arguments.json:
        arguments.json.write_text(json.dumps({"ratios": {n: [c / o for c, o in v] for n, v in figures.items()}}))


if __name__ == "__main__":
    main()
