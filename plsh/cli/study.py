"""``plsh study``: the paper's claims as runs that can fail, with figures and JSON."""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from .common import CliError, Parser, integer, progress
from .common import add_command as add

_EPILOG = """\
Results are JSON under --output, figures PNG beside them; docs/study.md is made of such results.

examples:
  plsh study structure --quick
  plsh study reduction --quick
  plsh study training --quick --output results
"""


def add_command(commands: Any) -> None:
    """Add the command, whose own commands are the studies."""
    summary = "test the paper's claims: judged from measurements, with figures and JSON"
    parser = commands.add_parser(
        "study", help=summary, description=summary[0].upper() + summary[1:] + ".", epilog=_EPILOG
    )
    studies = parser.add_subparsers(
        title="studies", metavar="STUDY", required=True, parser_class=Parser
    )
    _add_structure(studies)
    _add_reduction(studies)
    _add_training(studies)
    _add_model(studies)


def _add_study(studies: Any, name: str, call: Any, summary: str, epilog: str) -> Any:
    parser = add(studies, name, call, summary, epilog)
    parser.set_defaults(prog=f"plsh study {name}")
    parser.add_argument(
        "--output", type=Path, default=Path("study"), metavar="DIR", help="default study"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, under two minutes")
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="report on stderr (default: if it is a terminal)",
    )
    return parser


def _shown(args: argparse.Namespace) -> bool:
    return bool(sys.stderr.isatty() if args.progress is None else args.progress)


def _need(*modules: str) -> None:
    """Refuse where a module of the extra is missing, before any work."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise CliError(f'this study needs {", ".join(missing)}; pip install "plsh[study]"')


# --- structure ------------------------------------------------------------------------------------

_STRUCTURE = """\
Errors of the mean of s masks as a matrix, against s, sigma and n, symmetric and causal, and the
longest blocks, beside the bounds of theorem 2.1.

example:
  plsh study structure --quick
"""


def _add_structure(studies: Any) -> None:
    summary = "measure the mean of random masks against ALiBi's matrix (theorem 2.1)"
    _add_study(studies, "structure", _structure, summary, _STRUCTURE)


def _structure(args: argparse.Namespace) -> None:
    _need("matplotlib")
    from ..study import figures, output, structure

    folder = output.folder_of(args.output)
    settings = structure.QUICK if args.quick else structure.Settings()
    with progress(args.prog, "settings", structure.steps(settings), _shown(args)) as step:
        found = structure.run(settings, step)
    output.leave("structure", settings, found, folder, figures.structure)


# --- reduction ------------------------------------------------------------------------------------

_REDUCTION = """\
Errors of the output against s: random logits, inputs optimised against the drawn masks, the byte
model in the box and, by --model, any causal model that transformers' save_pretrained wrote into a
folder. Beside lsh, windows of exact ALiBi at its arithmetic and at its bandwidth; the bounds of
theorem 2.2; time against the length.

examples:
  plsh study reduction --quick
  plsh study reduction --model my-bloom --text book.txt
"""


def _add_reduction(studies: Any) -> None:
    summary = "measure attention under random masks against ALiBi's (theorem 2.2)"
    parser = _add_study(studies, "reduction", _reduction, summary, _REDUCTION)
    parser.add_argument(
        "--retime", action="store_true", help="time anew, keep the errors of an earlier run"
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="a folder of save_pretrained")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="default: the help topics of Python itself"
    )


def _reduction(args: argparse.Namespace) -> None:
    _need("torch", "matplotlib")
    from ..study import reduction_command

    reduction_command.run(args, _shown(args))


# --- training -------------------------------------------------------------------------------------

_TRAINING = """\
A run that is killed goes on from its checkpoint when the command is given again, with the same
bits at its end; a run that is complete is not run again. Seeds are outermost.

examples:
  plsh study training --output study
  plsh study training --text book.txt --seeds 5 --output book
"""


def _add_training(studies: Any) -> None:
    summary = "train language models under exact ALiBi, window, lsh and its rivals, and compare"
    parser = _add_study(studies, "training", _training, summary, _TRAINING)
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="default: the help topics of Python itself"
    )
    parser.add_argument(
        "--seeds", type=integer(1), default=3, metavar="N", help="runs of each arm (default 3)"
    )
    parser.add_argument("--steps", type=integer(1), metavar="N", help="of each run (default 1000)")
    parser.add_argument(
        "--threads", type=integer(1), default=1, metavar="T", help="of torch (default 1)"
    )


def _training(args: argparse.Namespace) -> None:
    _need("torch", "matplotlib", "tqdm")
    from ..study import training_command

    training_command.run(args, _shown(args))


# --- the model in the box -------------------------------------------------------------------------

_MODEL = """\
It trains on all documentation in the standard library, for an hour or two on one core, and goes on
from its checkpoint when the command is given again. --output/model/weights.npz is the file that
plsh.byte_model reads.

example:
  plsh study model --output results
"""


def _add_model(studies: Any) -> None:
    summary = "train the byte model that ships with plsh"
    parser = _add_study(studies, "model", _model, summary, _MODEL)
    parser.add_argument(
        "--threads", type=integer(1), default=1, metavar="T", help="of torch (default 1)"
    )


def _model(args: argparse.Namespace) -> None:
    _need("torch", "tqdm")
    from ..study import training_command

    training_command.model(args, _shown(args))
