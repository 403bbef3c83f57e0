"""`knapformer doctor`: is this machine ready for the run, and if not, what to do."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from knapformer_cli.checks import Check, all_checks
from knapformer_cli.config import compose


def doctor_command(overrides: Sequence[str]) -> None:
    """Check this machine for the configuration of `overrides`; exits with 1 when something must be mended."""
    config = compose(overrides)
    console, busy = Console(), Console(stderr=True)
    checks: list[Check] = []
    with busy.status("looking") as status:
        for check in all_checks(config):
            checks.append(check)
            status.update(f"looking: {len(checks)} checks done")
    console.print(table_of(checks))
    failed = [check for check in checks if check.fix]
    for check in failed:
        console.print(f"[bold red]{check.name}[/]: {escape(check.fix)}", soft_wrap=True, highlight=False)
    console.print(f"{len(failed)} to mend" if failed else "ready", highlight=False)
    sys.exit(1 if failed else 0)


def table_of(checks: Sequence[Check]) -> Table:
    """A row a check: whether all is well, and what was found."""
    table = Table("", "check", "found")
    for check in checks:
        mark = "[red]fix[/]" if check.fix else "[green]ok[/]"
        found = check.found + (f" ({check.note})" if check.note else "")
        table.add_row(mark, check.name, escape(found))
    return table
