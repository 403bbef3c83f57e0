"""Are the packages that will be imported ours? Asked before any of them is."""

import importlib.util
from pathlib import Path


def check_packages() -> None:
    """Raise ValueError when another project's `models`, `data` or `conf` hides ours."""
    ours = Path(__file__).resolve().parent.parent
    for name in ("knapformer", "models", "data", "conf"):
        spec = importlib.util.find_spec(name)
        places = list(spec.submodule_search_locations or [str(spec.origin)]) if spec else []
        if [Path(place).resolve() for place in places] != [ours / name]:
            raise ValueError(
                f"package {name} resolves to {', '.join(places) or 'nothing'} instead of {ours / name}; "
                "remove the other folder from PYTHONPATH or rename it"
            )
