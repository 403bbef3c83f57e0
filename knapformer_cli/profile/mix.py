"""The lengths of the steps to profile: from codes, from shards, from a file, or from a run.

S sequences of a step.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from data.codes import parse_codes, repeated_lengths
from knapformer_cli.schema import Config

MOST = 2**40  # tokens of a sequence, and numbers of steps
COLUMNS = ("length", "source", "step", "rank", "home")  # that are read of a file


@dataclass(frozen=True, eq=False)
class Batch:
    """The sequences of one step: tokens, the rank that reads them, and the number of their source."""

    len_S: np.ndarray
    home_S: np.ndarray
    source_S: np.ndarray


@dataclass(frozen=True, eq=False)
class Mix:
    """What is profiled: the batches of steps, numbered as their origin numbers them."""

    origin: str  # in words
    ranks: int
    sources: list[str]
    batches: list[Batch]
    steps: list[int]

    def first(self, steps: int) -> "Mix":
        """Its first steps."""
        return replace(self, batches=self.batches[:steps], steps=self.steps[:steps])

    def ordered(self) -> "Mix":
        """Sources that occur, in order of the mean length of their sequences."""
        source_S = np.concatenate([batch.source_S for batch in self.batches])
        count = np.bincount(source_S, minlength=len(self.sources))
        tokens = np.bincount(source_S, np.concatenate([batch.len_S for batch in self.batches]), len(count))
        order = [int(s) for s in np.argsort(tokens / np.maximum(count, 1), kind="stable") if count[s]]
        place = np.zeros(len(count), np.int64)
        place[order] = np.arange(len(order))
        batches = [replace(batch, source_S=place[batch.source_S]) for batch in self.batches]
        return replace(self, sources=[self.sources[s] for s in order], batches=batches)

    def tokens(self) -> float:
        """Mean tokens of a step."""
        return float(np.mean([batch.len_S.sum() for batch in self.batches]))


def mix_of_codes(code: str, ranks: int, steps: int, seed: int) -> Mix:
    """Steps drawn with seeds seed, seed + 1, ...; parts of the same pixels and frames are one source."""
    kinds = [part.kind for part in parse_codes(code)]
    names = list(dict.fromkeys(kinds))
    kind_P = np.array([names.index(kind) for kind in kinds])
    batches = []
    for step in range(steps):
        len_S, home_S, part_S = repeated_lengths(code, ranks, seed + step)
        batches.append(Batch(len_S, home_S, kind_P[part_S]))
    return Mix(f"length codes {code}", ranks, names, batches, list(range(1, steps + 1)))


def mix_of_shards(config: Config) -> Mix:
    """The first steps that training on profile.ranks would take: the loader's order, from the index alone.

    Captions are emptied as training does. Samples that turn out broken when decoded are counted here.
    """
    # Trainer and loader take seconds to import, which profiles of lengths alone need not wait for.
    from data.loader import Loader
    from knapformer_cli.launch import index_data
    from knapformer_cli.training.batch import dropped_captions

    t, ranks, manifest = config.training, config.profile.ranks, index_data(config.data)
    loader = Loader(
        config.data, manifest, batch_tokens=t.batch_tokens, rank=0, ranks=ranks, seed=t.seed, state=None
    )
    names = sorted(config.data.sources)
    number = [names.index(source.name) for source in manifest.sources]
    batches = []
    for draws, _ in islice(loader.order(), config.profile.steps):
        visual_S = np.array([np.prod(draw.grid) for draw in draws], np.int64)
        text_S = np.array([draw.tokens for draw in draws], np.int64) - visual_S
        dropped_S = np.array(dropped_captions([draw.number for draw in draws], t.caption_dropout, t.seed))
        home_S = np.array([draw.stream % ranks for draw in draws])
        source_S = np.array([number[draw.source] for draw in draws])
        order = np.argsort(home_S, kind="stable")
        batches.append(Batch((visual_S + text_S * ~dropped_S)[order], home_S[order], source_S[order]))
    return Mix("shards of " + ", ".join(names), ranks, names, batches, list(range(1, len(batches) + 1)))


def mix_of_file(path: Path, ranks: int, steps: int, batch_tokens: int) -> Mix:
    """CSV with a header, or JSONL: `length`, and where given `source`, `step`, `rank` (or `home`).

    Without steps, lines in their order fill batches of batch_tokens; without ranks, sequences of a step go
    round the ranks. ValueError names the line of what is no length, step or rank.
    """
    length, source, step, home = [], [], [], []
    for line, row in _rows(path):
        length.append(_whole(path, line, row, "length", 1, MOST))
        source.append(str(row.get("source", "") or path.stem))
        step.append(_whole(path, line, row, "step", 0, MOST) if "step" in row else None)
        rank = "rank" if "rank" in row else "home"
        home.append(_whole(path, line, row, rank, 0, ranks - 1) if rank in row else None)
        for name, column in (("step", step), ("rank or home", home)):
            if (column[-1] is None) != (column[0] is None):
                raise ValueError(f"{path} line {line}: {name} must stand in every line, or in none")
        if step[0] is None and length[-1] > batch_tokens:
            raise ValueError(
                f"{path} line {line}: length {length[-1]} is more than training.batch_tokens={batch_tokens}; "
                "raise it, or add a step column"
            )
    if not length:
        raise ValueError(f"{path} has no line with a length")
    names, len_S = sorted(set(source)), np.array(length)
    source_S = np.array([names.index(name) for name in names])[np.unique(source, return_inverse=True)[1]]
    step_S = _filled(length, batch_tokens) if step[0] is None else np.array(step)
    numbers = np.unique(step_S).tolist()
    if step[0] is None and len(numbers) > 1:  # the last batch is whatever was left
        numbers.pop()
    batches, numbers = [], numbers[:steps]
    for number in numbers:
        mine = np.flatnonzero(step_S == number)
        home_S = np.arange(len(mine)) % ranks if home[0] is None else np.array(home)[mine]
        order = np.argsort(home_S, kind="stable")
        batches.append(Batch(len_S[mine][order], home_S[order], source_S[mine][order]))
    return Mix(f"lengths of {path}", ranks, names, batches, numbers)


def _filled(length: list[int], batch_tokens: int) -> np.ndarray:
    """The batch of each line, filled as the loader fills them."""
    step, tokens, steps = 1, 0, []
    for tokens_of_line in length:
        if tokens and tokens + tokens_of_line > batch_tokens:
            step, tokens = step + 1, 0
        tokens += tokens_of_line
        steps.append(step)
    return np.array(steps)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number of the line, its columns) of a CSV or JSONL file."""
    if not path.is_file():
        wrong = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"profile.lengths={path} {wrong}; it must be a CSV or JSONL file of lengths")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from _json_rows(path, file) if path.suffix in (".jsonl", ".json") else _csv_rows(path, file)
    except UnicodeDecodeError as error:
        raise ValueError(f"profile.lengths={path} is no UTF-8 text: {error.reason}") from error


def _csv_rows(path: Path, file: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(file, skipinitialspace=True)
    if (header := reader.fieldnames) is None:
        raise ValueError(f"{path} is empty; its first line must be a header with a column length")
    if "length" not in header:
        raise ValueError(f"{path} line 1: the header {header} has no column length")
    for name in COLUMNS:
        if list(header).count(name) > 1:
            raise ValueError(f"{path} line 1: the header {header} has column {name} more than once")
    for row in reader:
        yield reader.line_num, row


def _json_rows(path: Path, file: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, text in enumerate(file, 1):
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} line {line} is no JSON: {error.msg}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path} line {line} is no object with a length")
        yield line, row


def _whole(path: Path, line: int, row: dict[str, Any], name: str, least: int, most: int) -> int:
    """A column's whole number; CSV gives text, JSON numbers."""
    value = row.get(name)
    try:
        number = int(value) if isinstance(value, str) else value
        if isinstance(number, int) and not isinstance(number, bool) and least <= number <= most:
            return number
    except ValueError:
        pass
    raise ValueError(f"{path} line {line}: {name} {value!r} is no whole number from {least} to {most}")
