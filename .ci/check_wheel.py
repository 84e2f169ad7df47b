"""What an installed wheel must be: importable alone, typed, and light. Usage: check_wheel.py FOLDER."""

import importlib.metadata
import sys
from pathlib import Path

HEAVY = {"transformers", "flashinfer", "typer", "rich", "matplotlib", "gguf"}

folder = Path(sys.argv[1]).resolve()

import radixkv  # noqa: E402

package = Path(radixkv.__file__).resolve().parent
assert package == folder / "radixkv", f"imported {package}, not the wheel in {folder}"
assert (package / "py.typed").is_file(), "the wheel has no py.typed"
assert not list(folder.glob("tests*")), "the wheel ships the tests"

loaded = HEAVY & set(sys.modules)
assert not loaded, f"`import radixkv` loads {sorted(loaded)}"

version = importlib.metadata.version("radixkv")
assert radixkv.__version__ == version, f"__version__ is {radixkv.__version__}, the wheel's {version}"
print(f"radixkv {version}: wheel imports, is typed and loads nothing optional")
