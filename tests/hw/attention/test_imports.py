"""Product quantisation stands upon attention: attention imports nothing of it."""

import ast
from pathlib import Path

import kvant.hw.attention


def test_attention_imports_no_product_quantisation():
    folder = Path(kvant.hw.attention.__file__).parent
    files = sorted(folder.glob("*.py"))
    assert len(files) > 1
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.startswith("kvant.hw.pq")], path.name
