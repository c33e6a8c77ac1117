"""Rules against the output of real frameworks, and the documentation's rules verbatim."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.core.logs.log_corpus.formats import (
    COLLECTIVES,
    FAULT_STEP,
    FORMATS,
    START_SECONDS,
    STDOUT,
    STEP_SECONDS,
    STEPS,
    Chunk,
    Written,
    reads,
    training,
)
from unbroken.core.logs.lines import LineAssembler
from unbroken.core.logs.rule_config import read_rules
from unbroken.core.logs.rule_events import Lines, LogStarted, RuleViolated
from unbroken.core.logs.rules import LogRules
from unbroken.core.tick import Tick
from unbroken.spec.problems import Report
from unbroken.wire.agent import RuleState

CORPUS = Path(__file__).parent / "log_corpus"
SEEDS = range(20)
Found = tuple[str, float, int | None]


def findings(
    entries: Sequence[Mapping[str, Any]], chunks: Iterable[Chunk], end: float
) -> tuple[list[Found], LogRules]:
    """Return reason, time and rank of all that the rules find until `end`."""
    report = Report()
    rules = LogRules(read_rules(entries, report), (0, 1))
    assert report.problems == []
    assemblers: dict[tuple[int, str], LineAssembler] = {}
    effects = rules.step(LogStarted(), 0.0)

    def tick(until: float) -> None:
        while (deadline := rules.deadline()) is not None and deadline < until:
            effects.extend(rules.step(Tick(), deadline))

    for chunk in chunks:
        tick(chunk.at)
        assembler = assemblers.setdefault((chunk.rank, chunk.stream), LineAssembler())
        lines = assembler.feed(chunk.data, chunk.is_drained)
        effects.extend(rules.step(Lines(chunk.rank, chunk.stream, lines), chunk.at))
    tick(end)
    found = [(e.reason, e.at, e.rank) for e in effects if isinstance(e, RuleViolated)]
    return found, rules


def rule(name: str, pattern: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "logPattern": pattern, **fields}


PATTERNS = {
    "hf_trainer": (r".*'loss': ([^,]+)", r".*samples_per_second': ([^}]+)", 0),
    "lightning": (r"Epoch \d+:.*train_loss=(\S+),", r"Epoch \d+:.*rate=([^\]]+)", 0),
    "megatron": (r".*iteration +\d+.*lm loss: (\S+)", r".*TFLOP/s/GPU\): (\S+)", 1),
    "nemo": (r"Training epoch.*reduced_train_loss: (\S+)", r"Training.*rate: (\S+)", 0),
    "torchtitan": (r".*step: +\d+  loss: +(\S+)", r".*mfu: (\S+)", 0),
    "deepspeed": (r".*\[Rank \d+\] step=.*loss=(\S+)", r".*CurrSamplesPerSec=([^,]+)", 0),
    "tqdm": (r".*\d+/\d+ .*loss=([^,]+),", r".*\d+/\d+ .*rate=([^\]]+)", 0),
}
"""Patterns of the loss and the rate, and the rank that logs them first."""


def rules_for(name: str) -> list[dict[str, Any]]:
    """Return the rules that a careful person writes for the format."""
    loss, rate, _ = PATTERNS[name]
    low = 20 if name == "torchtitan" else 100
    return [
        rule("Hang", loss, expectedStartCutOffInSeconds=60, expectedRecurringFrequencyInSeconds=10),
        rule("Loss", loss, metricThreshold=5, operator="gt", metricEvaluationDataPoints=5),
        rule("Rate", rate, metricThreshold=low, operator="lt", metricEvaluationDataPoints=5),
        rule("Memory", r".*(out of memory|OutOfMemoryError)", faultOnMatch=True),
    ]


def shown_steps(name: str) -> list[int]:
    """Return the steps that the format logs."""
    return list(range(0, STEPS, 2 if name == "hf_trainer" else 1))


def time_of(step: int) -> float:
    return START_SECONDS + step * STEP_SECONDS


def expected(name: str, fault: str | None) -> list[Found]:
    """Return the expected findings, by the time of each output."""
    before = [step for step in shown_steps(name) if step < FAULT_STEP]
    after = [step for step in shown_steps(name) if step >= FAULT_STEP]
    rank = PATTERNS[name][2]
    last_rank = 1 if name == "torchtitan" else rank
    hang: Found = ("LogHang_Hang", time_of(before[-1]) + 10, last_rank)
    slow_ranks = (0, 1) if name == "torchtitan" else (rank,)
    match fault:
        case "hang":
            return [hang]
        case "oom":
            return [("LogFault_Memory", time_of(FAULT_STEP), 1), hang]
        case "nan" | "spike":
            return [("LogSlow_Loss", time_of(after[4]), r) for r in slow_ranks]
        case "slow":
            return [("LogSlow_Rate", time_of(after[4]), r) for r in slow_ranks]
        case _:
            return []


@pytest.mark.parametrize("fault", [None, "hang", "nan", "spike", "slow", "oom"])
@pytest.mark.parametrize("name", FORMATS)
def test_each_fault_is_found_in_each_format_and_nothing_else(name: str, fault: str | None) -> None:
    for seed in SEEDS:
        chunks = reads(training(FORMATS[name], fault, seed), seed)
        found, _ = findings(rules_for(name), chunks, time_of(STEPS))
        assert found == expected(name, fault), f"seed {seed}"


def documented(name: str, rule_set: int = 0) -> list[dict[str, Any]]:
    """Return a rule set of the documentation, verbatim."""
    document = list(yaml.safe_load_all((CORPUS / name).read_text()))[rule_set]
    policy = document.get("spec", document)["runPolicy"]
    return list(policy["logMonitoringConfiguration"])


Line = Callable[[int, float, float], str]


def epoch_line(step: int, loss: float, _rate: float) -> str:
    return (
        "[default0]:2025-06-17 05:51:29,300 [INFO] __main__: Train Epoch: 5 "
        f"[{step * 60}/60000 ({step}%)]       loss={loss:.4f}"
    )


def loss_line(step: int, loss: float, _rate: float) -> str:
    return f"2025-06-17 05:51:29 INFO step {step} training_loss_step {loss}"


def tflops_line(step: int, _loss: float, rate: float) -> str:
    return f"Training model, speed: {rate} TFLOPs... step {step}"


def batch_line(step: int, loss: float, rate: float) -> str:
    return f"[Epoch 0 Batch {step}] {{'training_loss_step': {loss}, 'samples/sec': {rate}}}"


def logged(line: Line, fault: str | None) -> Iterator[tuple[float, list[Written]]]:
    """Return the output of a script that writes one line a step."""

    def form(step: Any) -> Iterator[Written]:
        yield Written(0, STDOUT, line(step.number, step.loss, step.rate) + "\n")

    return training(form, fault, 0)


DOCUMENTED: dict[str, tuple[int, Line, str | None, list[Found]]] = {
    "hang rules, healthy": (0, epoch_line, None, []),
    "hang rules, hang": (
        0,
        epoch_line,
        "hang",
        [("LogHang_JobHangingDetection", time_of(FAULT_STEP - 1) + 10, 0)],
    ),
    "loss rule, healthy": (1, loss_line, None, []),
    "loss rule, spike": (
        1,
        loss_line,
        "spike",
        [("LogSlow_LossSpikeDetection", time_of(FAULT_STEP + 4), 0)],
    ),
    "TFLOPs rule, healthy": (2, tflops_line, None, []),
    "TFLOPs rule, low": (
        2,
        tflops_line,
        "slow",
        [("LogSlow_TFLOPs", time_of(FAULT_STEP + 4), 0)],
    ),
    "TFLOPs rule, hang": (
        2,
        tflops_line,
        "hang",
        [("LogHang_TFLOPs", time_of(FAULT_STEP - 1) + 5, 0)],
    ),
}


@pytest.mark.parametrize(
    ("rule_set", "line", "fault", "found"), DOCUMENTED.values(), ids=DOCUMENTED
)
def test_rule_sets_of_the_documentation(
    rule_set: int, line: Line, fault: str | None, found: list[Found]
) -> None:
    entries = documented("usage_fragments.yaml", rule_set)
    chunks = reads(logged(_below_two(line), fault), 0)
    assert findings(entries, chunks, time_of(STEPS))[0] == found


def _below_two(line: Line) -> Line:
    """Lower the loss below the documented threshold, which is 2."""
    return lambda step, loss, rate: line(step, loss - 1 if loss < 3 else loss, rate)


def test_the_memory_rule_of_the_documentation() -> None:
    text = "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB\n"
    chunks = reads(iter([(5.0, [Written(1, "stderr", text)])]), 0)
    found, _ = findings(documented("usage_fragments.yaml", 3), chunks, 100)
    assert found == [("LogFault_GPU Error", 5.0, 1)]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_broken_collective_is_found_whatever_library_says_it(name: str) -> None:
    pattern = ".*(Watchdog caught collective|Connection closed by peer)"
    entries = [rule("Collective", pattern, faultOnMatch=True)]
    for seed in SEEDS:
        written = [Written(1, "stderr", COLLECTIVES[name])]
        found, _ = findings(entries, reads(iter([(5.0, written)]), seed), 100)
        assert found == [("LogFault_Collective", 5.0, 1)]


def main_example(fault: str | None, *, checkpoints: bool = True) -> Iterator[Chunk]:
    """Return a run for the main example: start, batches every 30 s, a checkpoint every 300 s."""
    written: list[tuple[float, list[Written]]] = []
    first = [] if fault == "start" else [Written(0, STDOUT, "INFO Experiment configuration: {}\n")]
    written.append((50.0, first))
    for number in range(120):
        at = 300.0 + number * 30
        if number >= 60 and fault == "hang":
            break
        loss = float("nan") if number >= 60 and fault == "nan" else 2.5
        rate = 79.5 if number >= 60 and fault == "slow" else 96.25
        texts = [batch_line(number, loss, rate)]
        if checkpoints and number % 10 == 9:
            texts.append("INFO The checkpoint is finalized. All shards is written.")
        written.append((at, [Written(0, STDOUT, text + "\n") for text in texts]))
    return reads(iter(written), 0)


LAST = 300.0 + 59 * 30
MAIN: dict[str, tuple[str | None, bool, list[Found]]] = {
    "healthy": (None, True, []),
    "no start": ("start", True, [("LogHang_JobStart", 120.0, None)]),
    "hang": (
        "hang",
        True,
        [
            ("LogHang_JobHangingDetection", LAST + 300, 0),
            ("LogHang_NoS3CheckpointingDetection", LAST + 600, 0),
        ],
    ),
    "the loss is no decimal": ("nan", True, [("LogHang_JobHangingDetection", LAST + 300, 0)]),
    "low throughput": ("slow", True, [("LogSlow_LowThroughputDetection", LAST + 25 * 30, 0)]),
    "no checkpoint": (None, False, [("LogHang_NoS3CheckpointingDetection", 1800.0, None)]),
}


@pytest.mark.parametrize(("fault", "checkpoints", "found"), MAIN.values(), ids=MAIN)
def test_the_main_example_of_the_documentation(
    fault: str | None, checkpoints: bool, found: list[Found]
) -> None:
    entries = documented("main_example.yaml")
    chunks = main_example(fault, checkpoints=checkpoints)
    assert findings(entries, chunks, 300.0 + 120 * 30)[0] == found


def test_nobody_is_called_hanging_because_another_rank_logs() -> None:
    """Find nothing by the documentation's rules if rank 0 logs and rank 1 is silent."""
    found, rules = findings(documented("main_example.yaml"), main_example(None), 3900)
    assert found == []
    assert {view.state for view in rules.views()} == {RuleState.HEALTHY}
    assert {view.last_rank for view in rules.views()} == {0}
