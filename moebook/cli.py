"""The command ``moebook``: run, check and build the book on four Mixture-of-Experts papers.

What a command needs is imported when it runs, so that ``moebook list`` starts at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import re
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from moebook import __version__, lists
from moebook.errors import extra, nearest, printable, refuse, told

LIVE = ("smoke", "cpu", "gpu", "paper")
"""The tiers at which a whole book can be executed; the others are of pools."""
# Signals that end a command in good order; Windows has no SIGHUP.
ENDS = (
    "SIGHUP",
    "SIGTERM",
)

BARS = (
    "TQDM_DISABLE",
    "HF_HUB_DISABLE_PROGRESS_BARS",
    "HF_DATASETS_DISABLE_PROGRESS_BARS",
)

MODELS = Path(__file__).parent / "models"
BASES = sorted(path.parent.name for path in MODELS.glob("*/recipe.yaml"))
ON = "parameter file beside the notebook: a tier, or a study's such as nano (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are refusals of one line, with the nearest word that it knows."""

    def error(self, message: str) -> NoReturn:
        """Refuse with ``E-USAGE``."""
        hint = f"see {self.prog} --help"
        choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        surplus = re.search(r"unrecognized arguments: (.+)", message, re.DOTALL)
        if choice:
            message = f"unknown '{choice[1]}'"
            hint = nearest(choice[1], re.findall(r"[\w-]+", choice[2]))
        elif surplus and surplus[1].startswith("-"):
            message = f"unknown '{surplus[1]}'"
            hint = nearest(surplus[1], self._option_string_actions)
        elif surplus:
            message = f"'{surplus[1]}' is one argument too many"
        refuse("E-USAGE", f"{self.prog}: {message}; {hint}")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help as all else is printed: argparse would hide that it could not be written."""
        print(message, end="", file=file)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code.

    0, 1 when a check failed, 2 for a refusal, also of the system, 3 for a fault of
    ours, 129, 130 and 143 after SIGHUP, Ctrl-C and SIGTERM, 141 when whoever reads the
    output has gone.
    """
    for name in ENDS:
        number = getattr(signal, name, None)
        # Under nohup a signal is ignored, and stays so.
        if number is None or signal.getsignal(number) is signal.SIG_IGN:
            continue
        signal.signal(number, _terminate)
    if arguments is None:  # the command itself, and no caller of ours
        _quiet()
    try:
        code = _run(arguments)
        lost = _end_output()
        if lost:
            raise lost
        return code
    except KeyboardInterrupt as interrupt:
        _end_output()
        print("interrupted; nothing half-written was left", file=sys.stderr)
        # `_terminate` gives the signal's number; Python's own for Ctrl-C has none.
        ended_by = interrupt.args[0] if interrupt.args else signal.SIGINT
        return 128 + ended_by
    except Exception as error:
        cause = _end_output(error) or error
        if isinstance(cause, BrokenPipeError):
            return 141
        refusal = told(cause)
        if refusal.code != "E-INTERNAL":
            print(refusal, file=sys.stderr)
            return 2
        report = _report(arguments)
        fault = "this is a fault of moebook: please report it"
        print(f"{refusal}; {fault} {report}", file=sys.stderr)
        return 3


def _quiet() -> None:
    """Leave the terminal to our own lines: libraries neither warn nor log there.

    Our own warnings begin with W-, and are a line each. Bars are kept where someone
    sees them move, and libraries' warnings where ``python -W`` asks for them. It comes
    before any library is imported, some of which read the variables only then.
    """
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", "W-")
        warnings.formatwarning = _warned
    logging.disable(logging.CRITICAL)
    if not (sys.stderr and sys.stderr.isatty()):
        os.environ |= dict.fromkeys(BARS, "1")


def _warned(message: Warning | str, *_: object, **__: object) -> str:
    """Write a warning as one line, without the place in the code that it came from."""
    return f"{printable(str(message))}\n"


def _run(arguments: Sequence[str] | None) -> int:
    try:
        options = _parse(arguments)
    except SystemExit:  # argparse has printed help, or the version
        return 0
    name = options.command.__name__.removesuffix("_")
    with extra("notebook", f"moebook {name}"):
        code: int = options.command(options)
    return code


def _end_output(ended_by: Exception | None = None) -> OSError | None:
    """Write out what was printed; where it cannot go, say why, and give it up.

    Python would try again when it ends, and complain in words of its own. An error that
    names no file is tried once more here: it may have come from printing.
    """
    nameless = isinstance(ended_by, OSError) and ended_by.filename is None
    try:
        print(end="\n" if nameless else "", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        error.filename = "standard output"
        return error
    return None


def _report(arguments: Sequence[str] | None) -> str:
    """Write what a report of the exception at hand needs to a file of its own, and name it."""
    system = f"moebook {__version__}, Python {sys.version}, {platform.platform()}"
    text = f"{system}\n{arguments or sys.argv[1:]}\n\n{traceback.format_exc()}"
    try:
        handle, name = tempfile.mkstemp(prefix="moebook-", suffix=".txt")
        with os.fdopen(
            handle, "w", encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(text)
    except OSError as error:
        return f"(its traceback could not be kept: {told(error)})"
    return f"with {name}"


def _terminate(number: int, frame: object) -> NoReturn:
    """End as after Ctrl-C, through the clean-up of every open block."""
    raise KeyboardInterrupt(number)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse, and let the sub-command's own parser complain about what is left over."""
    parser = Parser("moebook", description=_headline(__doc__), allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"moebook {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (function, wanted) in COMMANDS.items():
        text = _headline(function.__doc__)
        sub: Parser = commands.add_parser(
            name, help=text, description=text, allow_abbrev=False
        )
        sub.set_defaults(command=function, parser=sub)
        for words, rules in wanted:
            sub.add_argument(*words, **rules)
    options, rest = parser.parse_known_args(arguments)
    if rest:
        options.parser.error(f"unrecognized arguments: {rest[0]}")
    for name, value in vars(options).items():
        if value == "":
            options.parser.error(f"{name} is empty")
    return options


def _headline(docstring: str | None) -> str:
    """Return a docstring's first line, which is help; nothing under ``python -OO``."""
    return docstring.splitlines()[0] if docstring else ""


Command = Callable[[argparse.Namespace], int]
Option = tuple[tuple[str, ...], dict[str, Any]]
COMMANDS: dict[str, tuple[Command, tuple[Option, ...]]] = {}


def option(*names: str, **rules: Any) -> Option:
    """Describe an argument as `argparse.ArgumentParser.add_argument` takes it."""
    return names, rules


SET = option(
    "-p", action="append", default=[], metavar="NAME=VALUE", help="set a parameter"
)
DEVICE = option("--device", default="auto", help="auto, cpu, cuda (default: auto)")
DEVICE_CPU = option("--device", default="cpu", help="auto, cpu, cuda (default: cpu)")


def command(*options: Option) -> Callable[[Command], Command]:
    """Register a function as a sub-command; its docstring is the help."""

    def register(function: Command) -> Command:
        COMMANDS[function.__name__.removesuffix("_")] = function, options
        return function

    return register


@command(
    option("notebook", help="short name, such as pesc"),
    option(
        "--on", "--tier", dest="protocol", default="cpu", metavar="PROTOCOL", help=ON
    ),
    SET,
    option("--force", action="store_true", help="run even if nothing has changed"),
)
def run(options: argparse.Namespace) -> int:
    """Execute one notebook; the result goes to runs/mine/."""
    from moebook import storage
    from moebook.lab.run import parameters, runner, sources

    folder = storage.root()
    declared = sources.find(folder, options.notebook).parameters
    given = parameters.read_options(declared, options.p)
    runner.check_paths(given, folder)
    outcome = runner.run_notebook(
        options.notebook, options.protocol, given, folder=folder, force=options.force
    )
    if outcome:  # the first of several processes tells for all
        print(outcome.describe(folder))
    return 0


@command(
    option("notebook", nargs="?", help="short name, such as pesc"),
    option(
        "--on",
        dest="protocol",
        metavar="PROTOCOL",
        help="a parameter file, such as nano",
    ),
    option("--seeds", metavar="SEEDS", help="such as 0-9 or 3,5"),
    option("--arms", help="names with commas, or all (default: the protocol's)"),
    option("--jobs", type=int, metavar="N", help="runs at a time (default: cores)"),
    option(
        "--engine",
        default="local",
        choices=("local", "ray"),
        help="executor (default: local)",
    ),
    option(
        "--gpus-per-run",
        type=float,
        metavar="N",
        help="with ray, 0.5 too (default: none)",
    ),
    option("--add", metavar="FILE", help="add an executed notebook instead"),
    option(
        "--repeat",
        action="store_true",
        help="run recorded seeds once more, beside the record",
    ),
)
def study(options: argparse.Namespace) -> int:
    """Add runs to a pool, one per seed, or repeat them; exit with 1 if one failed."""
    from moebook import storage
    from moebook.lab.run import study as studies

    folder = storage.checkout()
    needed = (options.notebook, options.protocol, options.seeds)
    if options.add:
        optional = (options.arms, options.jobs, options.gpus_per_run)
        others = options.engine != "local" or options.repeat
        if {*needed, *optional} != {None} or others:
            refuse("E-USAGE", "moebook study: --add takes a file and nothing else")
        run, path = studies.add_notebook(Path(options.add), folder)
        where = path.relative_to(folder)
        print(f"{run.notebook} at {run.protocol}, seed {run.seed}: {where}")
        return 0
    if None in needed:
        expected = "expected NAME --on PROTOCOL --seeds 0-9, or --add FILE"
        refuse("E-USAGE", f"moebook study: {expected}")
    if options.jobs is not None and options.jobs < 1:
        refuse("E-RANGE", f"--jobs is {options.jobs}: expected at least 1")
    if options.jobs is not None and options.engine == "ray":
        refuse("E-RANGE", f"--jobs is {options.jobs}: a cluster decides by itself")
    if options.gpus_per_run is not None and options.engine != "ray":
        refuse("E-USAGE", "moebook study: --gpus-per-run needs --engine ray")
    if options.repeat and (options.engine == "ray" or options.arms is not None):
        why = "it runs here, with all arms on record"
        takes = "--repeat takes no --engine and no --arms"
        refuse("E-USAGE", f"moebook study: {takes}: {why}")
    seeds = lists.seeds("--seeds", options.seeds)
    which = (options.notebook, options.protocol, seeds)
    if options.repeat:
        failed = studies.repeat(*which, folder=folder, jobs=options.jobs)
    else:
        failed = studies.study(
            *which,
            folder=folder,
            arms=options.arms,
            jobs=options.jobs,
            engine=options.engine,
            gpus=options.gpus_per_run or 0.0,
        )
    return int(failed > 0)


@command()
def list_(options: argparse.Namespace) -> int:
    """List notebooks, parameters, protocols and their costs."""
    from moebook import storage
    from moebook.lab.run import sources

    print(sources.overview(storage.root()))
    return 0


@command(
    option("notebook", nargs="?", help="short name, such as pesc"),
    option(
        "--on", "--tier", dest="protocol", default="paper", metavar="PROTOCOL", help=ON
    ),
    option(
        "--gpu", default="h100", metavar="NAME", help="such as h200x8 (default: h100)"
    ),
    SET,
    option(
        "--price", type=float, help="dollars an hour and GPU (default: an assumption)"
    ),
    option("--efficiency", type=float, help="of the roofline (default: 0.5)"),
    option("--tokens", type=int, help="mean of a training row (default: its most)"),
    option(
        "--record", action="store_true", help="plan the papers' settings, for the book"
    ),
    option(
        "--measure", action="store_true", help="measure what is predicted, on --device"
    ),
    DEVICE_CPU,
)
def plan(options: argparse.Namespace) -> int:
    """Say what a notebook's trainings need, before they run: memory, hours, cost, what fits."""
    from moebook import storage
    from moebook.lab.bench import calibration
    from moebook.lab.pages import plans

    chosen = [bool(options.notebook), options.record, options.measure]
    if sum(chosen) != 1:
        refuse("E-USAGE", "moebook plan: expected NOTEBOOK, --record, or --measure")
    if options.notebook:
        assumptions = _given(options, "efficiency", "price", "tokens")
        report = plans.report(
            options.notebook,
            options.protocol,
            options.p,
            options.gpu,
            storage.root(),
            **assumptions,
        )
        print(report)
        return 0
    folder = storage.checkout()
    if options.record:
        path = plans.record(folder)
    if options.measure:
        path = calibration.calibrate(options.device, folder)
    print(f"record in {path.relative_to(folder)}")
    return 0


def _given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return those of some options that were given."""
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


@command(
    option("--tier", default="cpu", choices=LIVE, help="scale (default: cpu)"),
    option("--only", metavar="NOTEBOOK", help="execute this one, render everything"),
)
def book(options: argparse.Namespace) -> int:
    """Execute the notebooks that have changed, and render the book."""
    from moebook import storage
    from moebook.lab.pages import book as books

    books.make(options.tier, options.only, storage.checkout())
    return 0


@command(
    option("--port", type=int, default=8000, help="of this machine (default: 8000)")
)
def serve(options: argparse.Namespace) -> int:
    """Show the rendered book to browsers on this machine."""
    from moebook import storage
    from moebook.lab.pages import serving

    if not 0 <= options.port < 2**16:
        refuse("E-RANGE", f"--port is {options.port}; expected 0 to 65535")
    serving.serve(storage.checkout(), options.port)
    return 0


@command(
    option(
        "base", help="nano, nano-moe, smollm2, a folder, or org/name@commit of the hub"
    ),
    option(
        "--tasks",
        required=True,
        metavar="NAMES",
        help="of lm-eval or of ours, with commas",
    ),
    option(
        "--data",
        metavar="FOLDER",
        help="data sets in the hub's files, instead of the hub",
    ),
    option(
        "--limit", type=int, metavar="N", help="first rows of each task (default: all)"
    ),
    DEVICE,
    option(
        "--batch", type=int, default=16, help="sequences a forward pass (default: 16)"
    ),
    option(
        "--samples", type=int, default=1, help="programs per task of humaneval and mbpp"
    ),
    option(
        "--temperature",
        type=float,
        default=0.0,
        help="at which to sample them (default: 0)",
    ),
    option("--k", type=int, default=1, help="k of pass@k (default: 1)"),
    option(
        "--keep",
        metavar="FOLDER",
        help="keep programs and verdicts, and resume from here",
    ),
    option(
        "--judge",
        metavar="FOLDER",
        help="grade by MOEBOOK_JUDGE_URL, _MODEL; keep replies",
    ),
    option(
        "--budget",
        type=float,
        default=float("inf"),
        help="most that the judge may cost",
    ),
)
def evaluate(options: argparse.Namespace) -> int:
    """Evaluate a base on benchmarks, beside chance and its model card."""
    from moebook import evaluation, models
    from moebook.evaluation import code, judge

    sampling = code.Sampling(
        samples=options.samples, temperature=options.temperature, k=options.k
    )
    asks = None
    if options.judge:  # refused without its address, before a model is loaded
        asks = judge.Endpoint.from_environment(budget=options.budget)
    tasks = lists.tight(options.tasks).split(",")
    for name in tasks:
        if tasks.count(name) > 1:
            refuse("E-RANGE", f"--tasks lists '{name}' twice")
    model, tokenizer = models.load(options.base, device=options.device)
    settings: dict[str, Any] = {
        "limit": options.limit,
        "batch_size": options.batch,
        "data": options.data or "",
    }
    # These two are for programs alone, and refused where no task has any.
    if sampling != code.GREEDY:
        settings["sampling"] = sampling
    if options.keep is not None:
        settings["keep"] = options.keep
    table = evaluation.evaluate(model, tokenizer, tasks, **settings)
    summary = evaluation.summary(table, options.base)
    print(summary.to_string(float_format="{:.3f}".format))
    if asks:
        grader = judge.Judge(asks, Path(options.judge))
        grades = judge.agreement(judge.graded(grader, table))
        print(grades.to_string(float_format="{:.3f}".format))
        print(grader)
    return 0


@command(
    option("notebook", nargs="?", help="short name, bench, or banks; all by default"),
)
def verify(options: argparse.Namespace) -> int:
    """Check all runs, and the LoRAs that banks hold now, by their hashes; exit 1 on a mismatch."""
    from moebook import storage
    from moebook.lab.run.verifying import verify as findings_of

    findings = findings_of(options.notebook, storage.root())
    print("\n".join(map(str, findings)) or "no runs: there is nothing to verify")
    return int(not findings or any(finding.failures for finding in findings))


@command()
def doctor(options: argparse.Namespace) -> int:
    """Check whether this machine is ready, and say what to do if not; exit with 1 then."""
    from moebook.lab.run.doctor import examine

    ready = True
    for finding in examine(Path.cwd()):
        print(finding, flush=True)
        ready &= not finding.failures
    if not ready:
        print("not ready: see the lines that begin with FAILS")
        return 1
    print("this machine is ready")
    return 0


@command(
    option("paper", nargs="?", help="short name, such as rocket; all by default"),
    option("--all", action="store_true", help="also show the numbers that agree"),
)
def audit(options: argparse.Namespace) -> int:
    """Recompute the derived numbers of the papers' tables."""
    from moebook.lab import papers

    print(papers.report(papers.audit(options.paper), everything=options.all))
    return 0


@command(option("notebook", help="an executed notebook, such as my_run.ipynb"))
def compare(options: argparse.Namespace) -> int:
    """Compare an executed notebook with the book's runs."""
    from moebook import storage
    from moebook.lab.pages.compare import compare as beside

    print(beside(Path(options.notebook), storage.root()))
    return 0


@command(
    option(
        "op", nargs="?", help="such as experts, or shards; all ops by default, recorded"
    ),
    option("--peers", action="store_true", help="list the peers that are installed"),
    option("--threads", type=int, default=1, help="CPU threads (default: 1)"),
    DEVICE,
    option("--rounds", type=int, default=5, help="rounds of measurement (default: 5)"),
    option("--scale", help="tiny, small, full or model (default: that of the goals)"),
)
def bench(options: argparse.Namespace) -> int:
    """Time the ops against their floors and peers; record all of them at the goals' settings."""
    if options.threads < 1:
        refuse("E-RANGE", f"--threads is {options.threads}, expected at least 1")
    # Read when torch and NumPy are imported, which is below.
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ["GOMP_SPINCOUNT"] = "0"
    from moebook import storage
    from moebook.lab import bench as benches
    from moebook.lab.bench import report, scaling

    if options.peers:
        usual = (None, None, "auto", 5, 1)
        given = (
            options.op,
            options.scale,
            options.device,
            options.rounds,
            options.threads,
        )
        if given != usual:
            refuse(
                "E-USAGE",
                "moebook bench: --peers takes neither an op nor another option",
            )
        print(benches.installed().to_string())
        return 0
    if options.op == "shards":
        if (options.device, options.threads) != ("auto", 1):
            refuse(
                "E-USAGE", "moebook bench: shards takes neither --device nor --threads"
            )
        print(scaling.throughput(options.scale or "small", options.rounds).to_string())
        return 0
    folder = storage.checkout()
    device = options.device
    names = None if options.op is None else [options.op]
    frame = benches.measure(
        names, scale=options.scale, device=device, rounds=options.rounds
    )
    print(report.table(frame), flush=True)
    growth = benches.growth(names, device=device)
    print(f"\n{report.growth_table(growth)}")
    if options.op is not None:
        return 0  # a record holds all ops
    if report.stated(frame):
        path = report.write(folder, frame, growth, benches.ceilings(device))
        print(f"\nrecord in {path.relative_to(folder)}")
    else:
        needs = "goals are at full scale (GPU: model), 5 rounds or more, one thread"
        print(f"\nno record: {needs}")
    return 0


@command(
    option("base", choices=BASES, help="the base to pretrain"),
    option(
        "--steps", type=int, help="stop after this many steps; the next call continues"
    ),
    DEVICE_CPU,
)
def pretrain(options: argparse.Namespace) -> int:
    """Pretrain a base by its recipe, in runs/pretrain/; continue where it stopped."""
    from moebook import storage
    from moebook.models.load import PACKAGED, finished

    folder = storage.checkout()
    if not (folder / "recipes" / "pretrain.py").is_file():
        why = "which is in the repository, not in the package"
        fix = "run moebook pretrain in a clone of it"
        refuse("E-NOFILE", f"{folder} has no recipes/pretrain.py, {why}: {fix}")
    sys.path.insert(0, str(folder))
    recipe = MODELS / options.base / "recipe.yaml"
    work = folder / "runs" / "pretrain" / options.base
    out = work / "finished" if options.base in PACKAGED else finished(options.base)
    train = import_module("recipes.pretrain").pretrain
    losses = train(recipe, work, out, steps=options.steps, device=options.device)
    state = f"finished in {out}" if out.is_dir() else f"to be continued in {work}"
    last = f"last loss {losses[-1]:.3f} nats"
    print(f"{options.base}: {len(losses)} steps, {last}, {state}")
    return 0


if __name__ == "__main__":  # accelerate launch -m moebook.cli run pesc --tier paper
    sys.exit(main())
