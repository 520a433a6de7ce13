"""The console script: what it lists, in which forms it takes the strategy, and what it says about wrong ones."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import docstring_parser
import pytest
import torch
import yaml

from lightning_longmoe import LongMoEStrategy, config
from lightning_longmoe.cli import COMMANDS, STRATEGY_PATH, known_keys, main, strategy_by_class_path
from tests.pool import run_on_ranks

BASE = ["fit", "--model=lightning_longmoe.CausalLMModule"]


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of ``longmoe ARGUMENTS``."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(arguments))
            code: Any = 0
        except SystemExit as leaving:
            code = leaving.code
    return code or 0, out.getvalue(), err.getvalue()


def printed_config(*arguments: str) -> dict[str, Any]:
    code, out, err = run(*BASE, *arguments, "--print_config")
    assert code == 0, err
    return yaml.safe_load(out)


def write(folder: Path, text: str) -> str:
    (folder / "given.yaml").write_text(text)
    return f"--config={folder / 'given.yaml'}"


# ------------------------------------------------------------------------------------------------------------ commands
@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command_with_one_line(arguments: list[str]) -> None:
    code, out, _ = run(*arguments)
    assert code == 0
    assert set(COMMANDS) == {"fit", "validate", "test", "predict", "bench", "consolidate"}
    for name, command in COMMANDS.items():
        assert [line.split(maxsplit=1) for line in out.splitlines()].count([name, command.help]) == 1


def test_an_unknown_command_is_named_and_the_known_ones_are_listed() -> None:
    code, _, err = run("fitt")
    assert code == 2
    assert "'fitt' is no command" in err
    assert "consolidate" in err


def test_help_of_the_strategy_explains_every_field_of_every_group() -> None:
    code, out, _ = run("fit", "--trainer.strategy.help", STRATEGY_PATH)
    assert code == 0
    text = " ".join(out.split())
    for group, kind in (
        ("parallel", config.ParallelConfig),
        ("fsdp", config.FSDPConfig),
        ("recompute", config.RecomputeConfig),
        ("batch", config.BatchConfig),
        ("saving", config.SaveConfig),
    ):
        explained = {param.arg_name: param.description for param in docstring_parser.parse_from_object(kind).params}
        assert set(explained) == set(kind.__dataclass_fields__)
        for name, explanation in explained.items():
            assert f"--trainer.strategy.{group}.{name}" in text
            assert " ".join((explanation or "").split()[:6]) in text


# ---------------------------------------------------------------------------------------------- forms of the strategy
def test_the_default_strategy_is_ours_with_every_setting_shown() -> None:
    strategy = printed_config()["trainer"]["strategy"]
    assert strategy["class_path"] == STRATEGY_PATH
    assert strategy["init_args"]["parallel"]["expert_parallel_size"] == "auto"
    assert strategy["init_args"]["timeout_s"] == 1800


@pytest.mark.parametrize(
    "form",
    [
        ["--trainer.strategy=longmoe"],
        ["--trainer.strategy", "LongMoE"],
        ["--trainer.strategy=LongMoEStrategy"],
        [f"--trainer.strategy={STRATEGY_PATH}"],
        ["--trainer.strategy", STRATEGY_PATH],
        [f"--trainer.strategy.class_path={STRATEGY_PATH}"],
        [],
    ],
    ids=str,
)
def test_every_form_of_the_strategy_on_the_command_line_takes_settings_after_it(form: list[str]) -> None:
    settings = ["--trainer.strategy.parallel.expert_parallel_size=2", "--trainer.strategy.timeout_s=60"]
    strategy = printed_config(*form, *settings)["trainer"]["strategy"]
    assert strategy["class_path"] == STRATEGY_PATH
    assert strategy["init_args"]["parallel"]["expert_parallel_size"] == 2
    assert strategy["init_args"]["timeout_s"] == 60


def test_words_that_are_not_the_strategy_option_stay_as_they_are() -> None:
    words = ["fit", "--config", "longmoe", "--trainer.strategy=ddp", "--trainer.strategy.timeout_s", "longmoe"]
    assert strategy_by_class_path(words) == words


def test_a_printed_configuration_is_read_back_as_itself(tmp_path: Path) -> None:
    first = printed_config("--trainer.strategy.parallel.context_parallel_size=2", "--trainer.strategy.dispatch=null")
    assert printed_config(write(tmp_path, yaml.safe_dump(first))) == first
    assert first["trainer"]["strategy"]["init_args"]["dispatch"] is None


STRATEGIES_IN_FILES = {
    "name": "longmoe",
    "path": STRATEGY_PATH,
    "mapping": {"class_path": STRATEGY_PATH, "init_args": {"timeout_s": 60}},
}


def fit_with_strategy(folder: str, form: Any) -> tuple[str, float]:
    """The strategy of a run of two ranks, given in a file as ``form``."""
    import lightning.pytorch as pl

    seen: list[Any] = []
    original = pl.Trainer.fit
    pl.Trainer.fit = lambda self, *args, **kwargs: seen.append(self.strategy)  # type: ignore[method-assign]
    try:
        trainer = {"accelerator": "cpu", "devices": 2, "logger": False, "strategy": form}
        path = Path(folder, f"rank{os.environ['RANK']}.yaml")
        path.write_text(yaml.safe_dump({"trainer": trainer, "model": "lightning_longmoe.CausalLMModule"}))
        main(["fit", f"--config={path}"])
    finally:
        pl.Trainer.fit = original  # type: ignore[method-assign]
    return type(seen[0]).__name__, seen[0]._timeout.total_seconds()


@pytest.mark.parametrize("form", STRATEGIES_IN_FILES)
def test_a_file_gives_the_strategy_by_name_class_path_or_mapping(tmp_path: Path, form: str) -> None:
    expected = (LongMoEStrategy.__name__, 60.0 if form == "mapping" else 1800.0)
    assert run_on_ranks(2, fit_with_strategy, str(tmp_path), STRATEGIES_IN_FILES[form]) == [expected, expected]


# ------------------------------------------------------------------------------------------------------ wrong settings
PARALLEL_KEYS = str(list(config.ParallelConfig.__dataclass_fields__))
STRATEGY_KEYS = str(known_keys(STRATEGY_PATH, None))


@pytest.mark.parametrize(
    ("wrong", "listed", "hint"),
    [
        ("strategy.parallel.expert_paralel_size=2", PARALLEL_KEYS, "Did you mean 'expert_parallel_size'"),
        ("strategy.timeout=60", STRATEGY_KEYS, "Did you mean 'timeout_s'"),
        ("strategy.paralel.expert_parallel_size=2", STRATEGY_KEYS, "Did you mean 'parallel'"),
    ],
)
def test_a_wrong_key_on_the_command_line_lists_the_valid_ones(wrong: str, listed: str, hint: str) -> None:
    code, _, err = run(*BASE, f"--trainer.{wrong}")
    assert code == 2
    assert listed in err
    assert hint in err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trainer: {acelerator: cpu}", "Did you mean 'accelerator'"),
        ("model: {class_path: lightning_longmoe.CausalLMModule, init_args: {hiden_size: 3}}", "mean 'hidden_size'"),
        (f"trainer: {{strategy: {{class_path: {STRATEGY_PATH}, init_args: {{fsdp: {{block: a}}}}}}}}", "mean 'blocks'"),
        (f"trainer: {{strategy: {{class_path: {STRATEGY_PATH}, fsdp: {{}}}}}}", "go under `init_args:`"),
        (f"trainer: {{strategy: [{{class_path: {STRATEGY_PATH}}}]}}", "Write `strategy: longmoe`"),
    ],
)
def test_a_wrong_file_is_refused_with_what_would_be_right(tmp_path: Path, text: str, expected: str) -> None:
    code, _, err = run("fit", write(tmp_path, text))
    assert code == 2
    assert expected in err


def test_a_strategy_that_is_neither_name_nor_class_lists_the_names() -> None:
    code, _, err = run(*BASE, "--trainer.strategy=lngmoe")
    assert code == 2
    assert "'lngmoe' is no registered name" in err
    assert "'longmoe'" in err


def test_a_value_that_the_strategy_refuses_says_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="replicate_size.*whole number of at least 1"):
        main([*BASE, "--trainer.strategy.parallel.replicate_size=0"])


# ---------------------------------------------------------------------------------------------------------- whole runs
def run_all(folder: str) -> dict[str, Any]:
    """``fit`` twice into one folder, ``validate`` from its checkpoint; in a worker of the pool."""
    text = Path(folder, "text.txt")
    if os.environ["RANK"] == "0":
        text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    torch.distributed.barrier()
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "ffn_size": 16, "num_experts": 4}
    common = [
        "--trainer.accelerator=cpu",
        "--trainer.devices=2",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        "--trainer.logger=lightning.pytorch.loggers.CSVLogger",
        f"--trainer.logger.save_dir={folder}",
        "--trainer.logger.version=0",
        "--model=lightning_longmoe.CausalLMModule",
        *(f"--model.{name}={value}" for name, value in sizes.items()),
        "--data=lightning_longmoe.LongTextDataModule",
        f"--data.paths={text}",
        "--data.sequence_length=32",
    ]
    checkpoint = f"{folder}/lightning_logs/version_0/checkpoints/epoch=0-step=2.ckpt"
    fit = ["fit", *common, "--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"]
    main(fit)
    main([*fit, "--seed_everything=7"])
    main(["validate", *common, f"--ckpt_path={checkpoint}"])
    return {"files": sorted(path.name for path in Path(folder, "lightning_logs/version_0").iterdir())}


def test_fit_validate_and_consolidate_work_and_no_saved_configuration_is_overwritten(tmp_path: Path) -> None:
    result = run_on_ranks(2, run_all, str(tmp_path), timeout_s=120)[0]
    assert {"config.yaml", "config_1.yaml", "config_2.yaml", "metrics.csv"} <= set(result["files"])
    version = tmp_path / "lightning_logs/version_0"
    saved = [yaml.safe_load((version / f"config{suffix}.yaml").read_text()) for suffix in ("", "_1")]
    assert [config["seed_everything"] for config in saved] == [1, 7]

    out = tmp_path / "one.ckpt"
    code, _, err = run("consolidate", str(version / "checkpoints/epoch=0-step=2.ckpt"), str(out))
    assert code == 0, err
    weights = torch.load(out, weights_only=True)["state_dict"]
    assert weights["head.weight"].shape == (256, 16)


# --------------------------------------------------------------------------------------------------- errors and the end
SMALL = [
    *BASE,
    "--data=lightning_longmoe.LongTextDataModule",
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.limit_train_batches=2",
    "--trainer.limit_val_batches=1",
    "--trainer.max_epochs=1",
    "--trainer.enable_progress_bar=false",
    "--trainer.logger=false",
]


def _fit_small(folder: str, *more: str) -> tuple[int, str, str]:
    os.chdir(folder)
    return run(*SMALL, *more)


def test_a_refusal_of_ours_is_one_line_and_a_traceback_on_request(tmp_path: Path) -> None:
    code, _, err = run_on_ranks(1, _fit_small, str(tmp_path), "--trainer.precision=16-true", init_group=False)[0]
    assert code == 1
    assert "error: Trainer(precision='16-true') is not supported" in err
    assert "Traceback" not in err


def test_a_fit_ends_with_the_place_of_its_checkpoint(tmp_path: Path) -> None:
    code, out, err = run_on_ranks(1, _fit_small, str(tmp_path), init_group=False)[0]
    assert code == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("Checkpoint: ")]
    path = tmp_path / line.removeprefix("Checkpoint: ")
    assert path.is_dir()
    assert f"longmoe consolidate {line.removeprefix('Checkpoint: ')} checkpoint.pt" in out
