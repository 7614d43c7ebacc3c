"""Chat templates shaped like those of the common open models, each with the trait that it is here for."""

from pathlib import Path

_HERE = Path(__file__).parent


def __getattr__(name: str) -> str:
    path = _HERE / f"{name.lower()}.jinja"
    if not path.is_file():
        raise AttributeError(name)
    return path.read_text(encoding="utf-8")
