"""From overrides on the command line to a resolved, typed configuration, and to RUN/config.yaml and back."""

import difflib
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from knapformer_cli.rules import check_rules
from knapformer_cli.schema import Config

GROUPS = ["model", "data", "balancer", "optimizer", "scheduler", "training", "parallel", "checkpoint"]
GROUPS += ["logging", "launch", "cluster", "slurm", "experiment"]

# What a run may change when it goes on: none of it enters the mathematics of a step (a law of the balancer).
FREE_ON_RESUME = ["run", "balancer", "launch", "logging", "checkpoint", "sampling"]
FREE_ON_RESUME += ["cluster", "profile", "calibrate", "slurm"]
FREE_ON_RESUME += ["parallel.threads", "parallel.compile", "parallel.activation_checkpointing"]
FREE_ON_RESUME += ["training.max_tokens_per_rank", "data.demo", "data.cache", "data.workers", "data.prefetch"]
FREE_ON_RESUME += ["data.timeout", "data.retries"]


def compose(overrides: Sequence[str]) -> Config:
    """The configuration of `overrides`, typed; Hydra's grammar: a.b=c, +x=y, ++x=y, ~x, group=choice.

    Raises ValueError, in one sentence, for an unknown key or choice, a wrong type, a sweep, or a malformed
    override.
    """
    overrides = [_plain(override) for override in overrides]
    for override, values in _sweeps(overrides):
        raise ValueError(
            f"{override} lists {len(values)} values for one run; add --sweep to train one run each"
        )
    return _compose(overrides)


def expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Every combination of the values that the overrides list, one list of overrides a run."""
    overrides = [_plain(override) for override in overrides]
    swept = dict(_sweeps(overrides))
    runs: list[list[str]] = [[]]
    for override in overrides:
        runs = [[*run, choice] for run in runs for choice in swept.get(override, [override])]
    return runs


def to_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def from_yaml(text: str) -> Config:
    merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(text))
    return cast(Config, OmegaConf.to_object(merged))


def load_config(path: Path) -> Config:
    """The configuration written to `path`; ValueError when there is none or it does not fit this version."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; a run folder holds the config.yaml of its run")
    try:
        return from_yaml(path.read_text())
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ValueError(f"{path} is no configuration of this version: {_first_line(error)}") from error


def check_same_run(config: Config, folder: Path) -> None:
    """Raise ValueError when `folder` holds the run of a configuration that would train something else."""
    path = folder / "config.yaml"
    if not path.is_file():
        return
    ours, theirs = _flat(config), _flat(load_config(path))
    # A learning rate that falls over training.steps is another curve with another number of them.
    falls = config.scheduler.decay != "constant" and config.scheduler.steps is None
    allowed = FREE_ON_RESUME if falls else [*FREE_ON_RESUME, "training.steps"]
    for key in sorted(ours.keys() | theirs.keys()):
        free = any(key == name or key.startswith(name + ".") for name in allowed)
        if not free and ours.get(key) != theirs.get(key):
            raise ValueError(
                f"run.dir {folder} belongs to a run with {key}={theirs.get(key)}, not {ours.get(key)}; "
                "choose another run.dir or the same configuration"
                + ("; with scheduler.steps set, training.steps may change" if key == "training.steps" else "")
            )


def _flat(config: Config) -> dict[str, Any]:
    def walk(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in node.items():
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    return dict(walk(OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True), ""))


def _plain(override: str) -> str:
    """The override in Hydra's grammar: a source may be new; shards and length codes hold braces and commas.

    Raises ValueError for what is no override.
    """
    _check_form(override)
    if match := re.fullmatch(r"(\+{0,2}data\.codes)=([^'\"].*)", override):
        return f"{match[1]}='{match[2]}'"
    if match := re.fullmatch(r"\+{0,2}(slurm\.env\.\w+=.*)", override):  # any variable
        return f"++{match[1]}"
    if not (match := re.fullmatch(r"\+{0,2}(data\.sources\.[^.=]+\.)([^.=]+)=(.*)", override)):
        return override
    source, key, value = match.groups()
    if key == "shards" and value[:1] not in ("[", "'", '"'):
        value = "'" + value.replace("'", "\\'") + "'"
    return f"++{source}{key}={value}"


def _check_form(override: str) -> None:
    if override.startswith("-"):
        raise ValueError(
            f"{override} is no option of this command; see --help, and write settings as key=value"
        )
    key = override.split("=", 1)[0].lstrip("+~")
    if "=" not in override and not override.startswith("~"):
        raise ValueError(f"{override!r} is no setting; write key=value, for example training.steps=100")
    if override.endswith("=???"):
        raise ValueError(f"{override} says that the value is missing; give one, or leave the key out")
    if key == "hydra" or key.startswith("hydra."):
        raise ValueError(f"{override!r} touches hydra's own settings, which this program does not use")


def _parse(overrides: Sequence[str]) -> list[Any]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    parsed = []
    for override in overrides:
        try:
            parsed += OverridesParser.create().parse_overrides([override])
        except OverrideParseException as error:
            detail = _first_line(error.__cause__ or error)
            hint = "values with spaces, braces, quotes or commas need quotes of their own: 'run.dir=\"a b\"'"
            raise ValueError(f"{override!r} cannot be read as key=value ({detail}); {hint}") from error
    return parsed


def _sweeps(overrides: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    for override, parsed in zip(overrides, _parse(overrides), strict=True):
        if parsed.is_sweep_override():
            yield (
                override,
                [f"{parsed.input_line.split('=', 1)[0]}={v}" for v in parsed.sweep_string_iterator()],
            )


def _compose(overrides: Sequence[str]) -> Config:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException

    # Hydra sees the defaults untyped, so that data.sources can take new entries; the merge checks types.
    ConfigStore.instance().store(name="schema", node=OmegaConf.to_container(OmegaConf.structured(Config)))
    try:
        with initialize_config_module("conf", version_base="1.3"):
            composed = hydra_compose("config", overrides=list(overrides))
        config = from_yaml(OmegaConf.to_yaml(composed))
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ValueError(_explain(error, overrides)) from error
    if not config.run.dir:
        config.run.dir = f"runs/{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    check_rules(_flat(config))
    return config


def _explain(error: BaseException, overrides: Sequence[str]) -> str:
    """One sentence for what Hydra and OmegaConf say over many lines."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__
    text = "\n".join(str(e) for e in chain)
    for override, parsed in zip(overrides, _parse(overrides), strict=True):
        key = str(parsed.key_or_group)
        no_name = "Config group override" in text and not isinstance(parsed.value(), str)
        if key in GROUPS and (f"'{key}/" in text or no_name):
            return f"{key}={parsed.value()} is no choice; use one of {', '.join(_choices(key))}"
        if re.search(rf"full_key: {re.escape(key)}$", text, re.MULTILINE) and _known(key):
            return f"{override} has the wrong type: {_first_line(chain[-1])}"
        if key not in GROUPS and not _known(key):
            return f"{key} is no key of the configuration{_suggest(key)}"
    return _first_line(chain[-1])


def _known(key: str) -> bool:
    names = _flat(Config())
    source = re.fullmatch(r"data\.sources\.[^.]+(\.shards|\.weight|\.exhausted)?", key)
    variable = re.fullmatch(r"slurm\.env(\.\w+)?", key)
    return key in names or any(name.startswith(key + ".") for name in names) or bool(source or variable)


def _suggest(key: str) -> str:
    names = list(_flat(Config()))
    last = [name for name in names if name.rpartition(".")[2] == key.rpartition(".")[2]]
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.6) or last[:1]
    return f"; did you mean {close[0]}?" if close else "; --dry-run prints all of them"


def _choices(group: str) -> list[str]:
    from importlib.resources import files

    return sorted(
        p.name.removesuffix(".yaml") for p in (files("conf") / group).iterdir() if p.name.endswith(".yaml")
    )


def _first_line(error: BaseException) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"\s+", " ", line)
