"""The FSDP example with the arguments of HyperPod's document: a data set and a tokenizer by name.

A hub on this machine has both, under the names of the document.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import runpy
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import pytest
import yaml

from tests.cli_forks import run_unbroken
from tests.e2e.clusters import Cluster
from tests.e2e.conftest import kubectl_path as kubectl_path
from tests.e2e.conftest import make_cluster as make_cluster
from tests.examples.hub import serving
from tests.tiers import FRAMEWORKS_ENV
from tests.watching import wait_until

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "examples/fsdp/train.py"
MANIFEST = ROOT / "tests/spec/manifests/fsdp-llama3-8b.yaml"
SIZES = {
    **{"max_context_width": 64, "num_key_value_heads": 2, "num_heads": 2, "hidden_width": 32},
    **{"intermediate_size": 64, "num_layers": 2},
}
"""Sizes of a model that a CPU trains in milliseconds; the document's has 13 billion parameters."""
CARD = """---
configs:
- config_name: en
  data_files:
  - {split: train, path: en/c4-train.*.json.gz}
  - {split: validation, path: en/c4-validation.*.json.gz}
---
"""
TOKENIZER = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
folder, *files = sys.argv[1:]
made = Tokenizer(models.BPE())
made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
made.train(files, trainers.BpeTrainer(
    vocab_size=1000, special_tokens=["<s>", "</s>"], show_progress=False,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
))
PreTrainedTokenizerFast(
    tokenizer_object=made, bos_token="<s>", eos_token="</s>"
).save_pretrained(folder)
"""

SMALL = """
import os, sys
os.environ |= {environment!r}
os.execv({python!r}, [{python!r}, {script!r}, *sys.argv[1:], *{options!r}])
"""
"""Script in the place of the manifest's: the example with more options and variables, executed by
the Python of the frameworks, which stands for the image's."""
FSDP = "llama3-1-8b-fsdp-hpto"


def document_arguments() -> list[str]:
    """Return the arguments of the script in the document's manifest."""
    job = yaml.safe_load(MANIFEST.read_text())
    (container,) = job["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"]
    words: list[str] = container["command"]
    return words[words.index("/fsdp/train.py") + 1 :]


def small(**more: object) -> list[str]:
    """Return options that follow the document's and take their place."""
    return [f"--{name}={value}" for name, value in (SIZES | more).items()]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Serve the document's data set and tokenizer; return the variables that point there."""
    folder = tmp_path_factory.mktemp("hub")
    texts = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    rows = folder / "datasets/allenai/c4/en"
    rows.mkdir(parents=True)
    (rows.parent / "README.md").write_text(CARD)
    parts = {f"c4-train.{n:05}-of-00008": texts[n + 1 :: 16] for n in range(8)}
    for name, files in {**parts, "c4-validation.00000-of-00001": texts[::16]}.items():
        with gzip.open(rows / f"{name}.json.gz", "wt") as shard:
            for file in files:
                row = {"text": file.read_text(errors="replace"), "url": file.name}
                shard.write(json.dumps(row) + "\n")
    tokenizer = folder / "hf-internal-testing/llama-tokenizer"
    made = [FRAMEWORKS_ENV / "bin/python", "-c", TOKENIZER, tokenizer, *texts[::8]]
    subprocess.run(made, check=True)
    with serving(folder) as url:
        yield {"HF_ENDPOINT": url, "HF_HOME": str(folder / "home"), "FOLDER": str(folder)}


def train(
    folder: Path, python: Path | str, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the example as one rank."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    return subprocess.run(
        [python, TRAIN, *words],
        cwd=folder,
        env={
            **{**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
            **{**alone, "MASTER_PORT": "0", "CUDA_VISIBLE_DEVICES": "", **variables},
        },
        capture_output=True,
        text=True,
        check=False,
    )


def losses(text: str) -> dict[int, float]:
    """Return the loss of each batch that was printed."""
    return {int(step): float(loss) for step, loss in re.findall(r"Batch (\d+)\] Loss: (\S+)", text)}


@pytest.mark.slow
def test_a_package_that_is_missing_is_named_with_what_to_do_without_it(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = train(tmp_path, sys.executable, "--dataset=allenai/c4")
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()[-1:]
    assert line.startswith("--dataset=allenai/c4: No module named 'datasets'")
    assert line.endswith("(pip install datasets) Or give --dataset_path=FOLDER with *.jsonl files.")
    done = train(tmp_path, sys.executable, "--tokenizer=some/tokenizer")
    assert "(pip install transformers) Or give --tokenizer=FOLDER, or none" in done.stderr


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--num_key_value_heads=0", "--num_key_value_heads=0: give a whole number of at least 1"),
        ("--warmup=-1", "--warmup=-1: give a whole number of at least 0"),
        ("--hidden_width=132", "--hidden_width=132 --num_heads=4 --num_key_value_heads=2: the "),
        ("--max_steps=abc", "argument --max_steps: invalid int value: 'abc'"),
    ],
)
@pytest.mark.slow
def test_a_wrong_option_is_refused_in_two_lines(tmp_path: Path, option: str, message: str) -> None:
    pytest.importorskip("torch")
    done = train(tmp_path, sys.executable, option)
    assert done.returncode == 2
    usage, error = done.stderr.splitlines()
    assert usage == "usage: train.py [--OPTION=VALUE ...]"
    assert error.startswith(f"train.py: error: {message}")


@pytest.mark.slow
def test_each_rank_has_samples_to_validate_on() -> None:
    pytest.importorskip("torch")
    part_of = runpy.run_path(str(TRAIN))["part_of"]
    held = list(range(64))
    for ranks in (1, 3, 5, 64, 1000):
        parts = [part_of(held, rank, ranks) for rank in range(ranks)]
        assert set(chain.from_iterable(parts)) == set(held)
        # Else some ranks wait for the others for ever: each pass takes all of them.
        assert len({len(part) for part in parts}) == 1
    assert [part_of(held, rank, 1000) for rank in (0, 63, 64, 999)] == [[0], [63], [0], [39]]


@pytest.mark.slow
def test_two_ranks_train_without_numpy(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    package = tmp_path / "packages/numpy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ModuleNotFoundError('not installed')")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(TRAIN, "--max_steps=6", "--checkpoint_freq=2", f"--checkpoint_dir={tmp_path}/saved"),
        ],
        env={
            **os.environ,
            **{"PYTHONPATH": f"{package.parent}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"},
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(losses(done.stdout)) == list(range(6))
    assert (tmp_path / "saved/step-00000004.attempt-0").is_dir()


@pytest.mark.parametrize("option", ["--dataset=allenai/c4", "--tokenizer=some/tokenizer"])
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.frameworks
def test_without_a_network_the_error_says_what_to_do(tmp_path: Path, option: str) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = train(tmp_path, FRAMEWORKS_ENV / "bin/python", option, **offline)
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith(f"{option}: ")
    assert "(is there a network or a cache (HF_HOME)?) Or give --" in line
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.frameworks
def test_the_arguments_of_the_document_train_and_resume(
    tmp_path: Path, hub: dict[str, str]
) -> None:
    words, python = document_arguments(), FRAMEWORKS_ENV / "bin/python"
    assert "--dataset=allenai/c4" in words
    done = train(tmp_path, python, *words, *small(max_steps=60, learning_rate=0.01), **hub)
    assert done.returncode == 0, done.stderr
    seen = losses(done.stdout)
    assert list(seen) == list(range(60))
    assert seen[59] < seen[0] - 1
    assert "[Batch 49] Validation loss: " in done.stdout
    done = train(tmp_path, python, *words, *small(max_steps=62, learning_rate=0.01), **hub)
    assert "resumed at step 51 from disk" in done.stdout
    assert list(losses(done.stdout)) == list(range(51, 62))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.frameworks
def test_a_tokenizer_is_taken_from_a_folder(tmp_path: Path, hub: dict[str, str]) -> None:
    folder = Path(hub["FOLDER"], "hf-internal-testing/llama-tokenizer")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    python = FRAMEWORKS_ENV / "bin/python"
    done = train(tmp_path, python, *small(max_steps=1), f"--tokenizer={folder}", **offline)
    assert done.returncode == 0, done.stderr
    # The logarithm of the size of the vocabulary: 256 bytes would begin at 5.5.
    assert losses(done.stdout)[0] == pytest.approx(6.9, abs=0.1)


@pytest.fixture(scope="module")
def hyperpod(tmp_path_factory: pytest.TempPathFactory, kubectl_path: str) -> Iterator[Cluster]:
    """Two nodes with what the document's manifest asks of each, for one rank instead of eight."""
    found = Cluster(tmp_path_factory.mktemp("hyperpod") / "state", kubectl_path)
    found.unbroken(
        *("up", "--detach", "--nodes", "2", "--gpu-per-node", "1"),
        *("--resource", "vpc.amazonaws.com/efa=32"),
        *("--label", "sagemaker.amazonaws.com/compute-type=ml.p5.48xlarge"),
    )
    yield found
    found.take_away()


def manifest(folder: Path, hub: dict[str, str], **options: object) -> str:
    """Return the document's manifest for one GPU a node, with a script that has more options."""
    script = folder / "train.py"
    settings = {"python": str(FRAMEWORKS_ENV / "bin/python"), "script": str(TRAIN)}
    variables = hub | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    script.write_text(SMALL.format(**settings, environment=variables, options=small(**options)))
    text = MANIFEST.read_text().replace("/fsdp/train.py", str(script))
    text = text.replace("/tmp/hyperpod", f"{folder}/logs").replace("/mnt/k8s-disks", str(folder))
    text = re.sub(r'nprocPerNode: "8"', 'nprocPerNode: "1"', text)
    return re.sub(r"(nproc_per_node=|gpu: )8", r"\g<1>1", text)


def until(cluster: Cluster, condition: str) -> None:
    """Wait for a condition of the job."""
    cluster.wait(f"hyperpodpytorchjobs/{FSDP}", f"condition={condition}", seconds=500)


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.frameworks
def test_the_manifest_of_the_document_trains(
    hyperpod: Cluster, tmp_path: Path, hub: dict[str, str]
) -> None:
    text = manifest(tmp_path, hub, max_steps=60, learning_rate=0.01)
    hyperpod.kubectl("apply", "-f", "-", stdin=text)
    until(hyperpod, "Completed")
    # Its pods are gone by now: cleanPodPolicy All.
    outputs = (tmp_path / "logs").glob("*/attempt_0/0/stdout.log")
    text = "".join(output.read_text() for output in outputs)
    assert "checkpoint of step 50 begun" in text
    seen = losses(text)
    assert list(seen) == list(range(60))
    assert seen[59] < seen[0]
    job = hyperpod.get("hyperpodpytorchjobs", FSDP)
    assert not [one for one in job["status"]["conditions"] if one["type"] == "Faulted"]
    hyperpod.kubectl("delete", "hyperpodpytorchjobs", FSDP)


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.frameworks
def test_the_rule_of_the_document_restarts_a_job_that_prints_no_loss(
    hyperpod: Cluster, tmp_path: Path, hub: dict[str, str]
) -> None:
    text = manifest(tmp_path, hub, max_steps=10**9, logging_freq=10**9)
    hyperpod.kubectl("apply", "-f", "-", stdin=text)
    until(hyperpod, "Running")
    # Its rule JobStart waits for four minutes.
    until(hyperpod, "Faulted")
    until(hyperpod, "Running")
    culprit = hyperpod.get("incidents.unbroken.dev", f"{FSDP}-1")["spec"]["culprit"]
    assert (culprit["rule"], culprit["violation"]) == ("JobStart", "Hang")
    hyperpod.kubectl("delete", "hyperpodpytorchjobs", FSDP)


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hybrid_sharding_loses_no_step_with_a_worker_or_a_node(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """A node has the whole model: four ranks on two nodes, and a third node is free."""
    pytest.importorskip("torch")
    cluster = make_cluster("--nodes", "3")
    options = ("--max_steps=100000", "--sharding_strategy=hybrid", f"--checkpoint_dir={tmp_path}/c")
    size = ("--nnodes", "2", "--nproc-per-node", "2")
    cluster.unbroken("run", *size, "--name", "hybrid", "--detach", str(TRAIN), *options)

    def until_trained_after(starts: int) -> None:
        """Wait for ten steps after this number of starts from memory."""

        def has_trained(printed: str) -> bool:
            found = re.findall(r"resumed at step (\d+) from memory", printed)
            first = int(found[-1]) if found else 0
            return len(found) == starts and f"Batch {first + 10}]" in printed

        wait_until(
            lambda: cluster.unbroken("logs", "hybrid", "--rank", "0", check=False).stdout,
            has_trained,
            patience=600,
        )

    def chaos(command: str, rank: str) -> None:
        words = ["chaos", command, "--dir", str(cluster.directory), "hybrid", "--rank", rank]
        run_unbroken(words, Path.cwd(), os.environ).check_returncode()

    until_trained_after(0)
    chaos("kill-worker", "1")
    until_trained_after(1)
    chaos("kill-node", "3")
    until_trained_after(2)
    told = cluster.unbroken("explain", "hybrid").stdout
    assert "from memory (2 ranks) and buddy 0 (2 ranks)" in told
    assert "no step lost; no sample repeated or skipped" in told


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_manifest_of_the_example_runs_to_its_end(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    cluster = make_cluster("--nodes", "3")
    text = TRAIN.with_name("llama.yaml").read_text()
    assert "--max_steps=600" in text
    job = tmp_path / "llama.yaml"
    job.write_text(text.replace("--max_steps=600", "--max_steps=10"))
    cluster.kubectl("create", "configmap", "llama", f"--from-file={TRAIN}")
    done = cluster.unbroken("run", str(job))
    assert list(losses(done.stdout)) == list(range(10))
