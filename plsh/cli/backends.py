"""``plsh backends``: who is registered, who can compute here, and why not."""

import argparse
import dataclasses
import json
from typing import Any

from ..registry import backends
from .common import add_command as add
from .common import write, write_table

_EPILOG = """\
example:
  plsh backends --json
"""


def add_command(commands: Any) -> None:
    """Add the command to the parser."""
    summary = "list the backends: whether each can be used here, why not, and what it declares"
    parser = add(commands, "backends", list_backends, summary, _EPILOG)
    parser.add_argument("--json", action="store_true", help="print JSON, with all capabilities")


def list_backends(args: argparse.Namespace) -> None:
    """Print the table, or JSON."""
    infos = backends()
    if args.json:
        write(json.dumps([dataclasses.asdict(info) for info in infos], indent=2))
        return
    rows = []
    for info in infos:
        can = info.capabilities
        declared = ["-"] * 4
        if can is not None:
            lists = (can.arrays, can.dtypes, can.methods)
            declared = [*(",".join(names) or "-" for names in lists), can.gradients or "-"]
        available = "yes" if info.available else "no"
        rows.append((info.name, available, *declared, " ".join(info.reason.split()) or "-"))
    head = ("name", "available", "arrays", "dtypes", "methods", "gradients", "reason")
    write_table(head, rows)
    if not rows:
        write("none is registered, so plsh is not installed (a source tree?); pip install -e .")
