"""The console script ``longmoe``: train and evaluate from YAML, and tools around checkpoints.

``fit``, ``validate``, ``test`` and ``predict`` are a LightningCLI whose default strategy is `LongMoEStrategy`; any
LightningModule and LightningDataModule can be named in the configuration, those of the current folder too. A new
command is one line in ``COMMANDS``.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import os
import re
import shlex
import sys
import traceback
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

import lightning_longmoe  # registers the strategy by name
from lightning_longmoe.saving import CheckpointError

STRATEGY_NAME = "longmoe"
STRATEGY_PATH = "lightning_longmoe.LongMoEStrategy"
DEFAULT_SEED = 1
TRAINER_COMMANDS = {
    "fit": "train a model",
    "validate": "run the validation of a model once",
    "test": "run the test of a model once",
    "predict": "run a model over data and hand back its predictions",
}
REFUSED_KEY = re.compile(
    r"(?:(?:Group '(?P<group>[\w.]+)'|Subcommand '\w+') does not accept option|Option|unrecognized arguments:)"
    r" '?-*(?P<key>[\w.]+)"
)


def main(argv: list[str] | None = None) -> None:
    """Run one command.

    Args:
        argv: the words after ``longmoe``. None: those of this process. Several processes on one node need None, since
            the launcher starts this process's own command line again.
    """
    arguments = sys.argv[1:] if argv is None else argv
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(usage())
    elif name in COMMANDS:
        COMMANDS[name].run(arguments)
    else:
        print(f"{usage()}\n\nerror: {name!r} is no command.", file=sys.stderr)
        sys.exit(2)


def usage() -> str:
    """What ``longmoe --help`` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: longmoe COMMAND [options]",
            "",
            *lines,
            "",
            "longmoe COMMAND --help lists the options of a command. Those of the strategy, with what each means:",
            f"longmoe fit --trainer.strategy.help {STRATEGY_PATH}",
        ]
    )


# ---------------------------------------------------------------------------------------------------------------------
# fit, validate, test, predict
# ---------------------------------------------------------------------------------------------------------------------
def run_trainer(arguments: list[str]) -> None:
    """``longmoe fit|validate|test|predict ...``."""
    if os.getcwd() not in sys.path:  # modules of the current folder can be named, as under `python -m`
        sys.path.append(os.getcwd())
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")  # Lightning's own, nothing for a user to do
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    # argparse's own usage names all options, and would push an error out of sight.
    usages = {name: {"usage": f"longmoe {name} [options]"} for name in TRAINER_COMMANDS}
    with short_errors():
        cli = LongMoECLI(
            parser_class=LongMoEArgumentParser,
            parser_kwargs={"prog": "longmoe", **usages},
            trainer_defaults={"strategy": {"class_path": STRATEGY_PATH}},
            seed_everything_default=DEFAULT_SEED,
            save_config_callback=SaveRunConfig,
            save_config_kwargs={"overwrite": True},
            args=arguments,
        )
    tell_checkpoint(cli.trainer)


@contextlib.contextmanager
def short_errors() -> Iterator[None]:
    """A refusal of ours as one line instead of a traceback, which ``LONGMOE_TRACEBACK=1`` brings back."""
    try:
        yield
    except (ValueError, CheckpointError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = frames and Path(frames[-1].filename).is_relative_to(Path(lightning_longmoe.__file__).parent)
        if not ours or os.environ.get("LONGMOE_TRACEBACK", "0") not in ("", "0"):
            raise
        rank = os.environ.get("LOCAL_RANK", "0")
        print(f"error: {error}" if rank == "0" else f"error on rank {rank}: {error}", file=sys.stderr)
        sys.exit(1)


def tell_checkpoint(trainer: Trainer) -> None:
    """Where the checkpoint of a fit is, and how to make one file of a folder."""
    path = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if not trainer.is_global_zero or trainer.state.fn != TrainerFn.FITTING or not path:
        return
    path = os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path
    print(f"Checkpoint: {path}")
    if Path(path).is_dir():
        print(f"As one file that plain torch loads: longmoe consolidate {shlex.quote(path)} checkpoint.pt")


class LongMoECLI(LightningCLI):
    """LightningCLI that takes the strategy in every form in which people write it."""

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(strategy_by_class_path(args))

    @override
    def before_instantiate_classes(self) -> None:
        """A strategy given as text in a file: registered names go to the Trainer, class paths become classes.

        Lightning's own type is ``str | Strategy``, so a class path without settings would stay text, and the Trainer
        would look it up as a name, in lower case.
        """
        trainer = self.config[self.config["subcommand"]].trainer
        given = trainer.strategy
        if not isinstance(given, str) or given == "auto" or given.lower() in StrategyRegistry:
            return
        if "." not in given:
            self.parser.error(
                f"trainer.strategy={given!r} is no registered name. Registered are {sorted(StrategyRegistry)}."
                f"{advice_on_strategy()}"
            )
        trainer.strategy = Namespace(class_path=given)


def strategy_by_class_path(arguments: list[str]) -> list[str]:
    """The arguments with ``--trainer.strategy=longmoe`` spelled as a class path, so that settings can follow it."""
    spelled: list[str] = []
    for word in arguments:
        option, equals, value = word.partition("=")
        if not equals and spelled and spelled[-1] == "--trainer.strategy":
            option, value = spelled.pop(), word
        if option == "--trainer.strategy" and (value == "LongMoEStrategy" or value.lower() == STRATEGY_NAME):
            value = STRATEGY_PATH
        if option == "--trainer.strategy" and "." in value:
            spelled.append(f"--trainer.strategy.class_path={value}")
        elif option == "--trainer.strategy" and value:
            spelled.append(f"{option}={value}")
        else:
            spelled.append(word)
    return spelled


class LongMoEArgumentParser(LightningArgumentParser):
    """Errors that say which keys exist."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        super().error(message + advice_on_keys(message), ex)


def advice_on_keys(message: str) -> str:
    """What to do about a parser's error message: the keys that exist, or how a strategy is written; may be empty."""
    refused = REFUSED_KEY.search(message)
    owner = re.search(r"Problem with given class_path '([\w.]+)'", message)
    if refused:
        key, group = refused["key"], refused["group"]
        if group is None and "." in key:
            group, key = key.rsplit(".", 1)
        known = known_keys(owner[1] if owner else None, group)
        if not known and group is not None:  # not even the group exists
            key, group, known = group, None, known_keys(owner[1] if owner else None, None)
        if known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            hint += " Settings of a class go under `init_args:`." if key == "class_path" else ""
            return f"\n{group or (owner and owner[1]) or 'This command'} takes {known}.{hint}"
    if re.search(r'Parser key "(trainer\.)?strategy"', message) and owner is None:
        return advice_on_strategy()
    return ""


def known_keys(class_path: str | None, group: str | None) -> list[str]:
    """Names of the arguments of a class, or of those of one of its arguments that is a dataclass; [] if not known."""
    if class_path is None:
        owner: Any = {"trainer": Trainer, "model": LightningModule}.get(group or "")
        group = None
    else:
        module, _, name = class_path.rpartition(".")
        owner = getattr(sys.modules.get(module), name, None)
    if owner is not None and group is not None:
        owner = typing.get_type_hints(owner.__init__).get(group)
    if not inspect.isclass(owner):
        return []
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in inspect.signature(owner).parameters.items() if parameter.kind in kinds]


def advice_on_strategy() -> str:
    """The two forms of a strategy, as text to follow an error message."""
    return (
        f"\nWrite `strategy: {STRATEGY_NAME}`, or, to change settings,\n"
        f"  strategy:\n    class_path: {STRATEGY_PATH}\n    init_args:\n      parallel: {{expert_parallel_size: 2}}"
    )


class SaveRunConfig(SaveConfigCallback):
    """Saves the configuration beside the logs of a run, and never over an existing file."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.already_saved or not trainer.loggers:  # without a logger the run has no folder of its own
            return
        folder = Path(trainer.log_dir or ".")  # a broadcast: all ranks ask
        names = ["config.yaml", *(f"config_{number}.yaml" for number in range(1, 1000))]
        self.config_filename = next(name for name in names if not (folder / name).exists())
        super().setup(trainer, pl_module, stage)


# ---------------------------------------------------------------------------------------------------------------------
# Tools
# ---------------------------------------------------------------------------------------------------------------------
def run_consolidate(arguments: list[str]) -> None:
    """``longmoe consolidate CKPT OUT``."""
    from lightning_longmoe.saving import consolidate_command

    consolidate_command(arguments[1:])


BENCHES = ("dispatch", "vocabulary", "boundaries", "optimizer", "attention")


def run_bench(arguments: list[str]) -> None:
    """``longmoe bench NAME ...``: the module of that name in `lightning_longmoe.bench`."""
    name = arguments[1] if len(arguments) > 1 else "--help"
    if name not in BENCHES:
        out = sys.stdout if name in ("-h", "--help") else sys.stderr
        print(f"usage: longmoe bench {{{','.join(BENCHES)}}} [options]   (--help lists the options of each)", file=out)
        sys.exit(0 if out is sys.stdout else 2)
    importlib.import_module(f"lightning_longmoe.bench.{name}").main(arguments[2:])


class Command(NamedTuple):
    """One command: called with all words after ``longmoe``, its own name first."""

    run: Callable[[list[str]], None]
    help: str


COMMANDS = {
    **{name: Command(run_trainer, help) for name, help in TRAINER_COMMANDS.items()},
    "bench": Command(run_bench, "measure an operator beside its baselines"),
    "consolidate": Command(run_consolidate, "turn a checkpoint folder into one file that plain torch loads"),
}

if __name__ == "__main__":
    main()
