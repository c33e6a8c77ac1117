"""Builds the PyTorchJob of `unbroken hyperpod start-job` from a file and options."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from unbroken.cli.app import option
from unbroken.cli.documents import read_documents
from unbroken.cli.options import Namespace
from unbroken.errors import SpecError
from unbroken.spec.keys import AUTO_RESUME, MAX_RETRIES, QUEUE
from unbroken.spec.kubeflow.hyperpod_config import (
    CHECKED_ONLY,
    SCHEDULABLE,
    pytorchjob,
    read_config,
    resume_annotations,
)
from unbroken.spec.nodes.instance_types import instance_type
from unbroken.spec.problems import ManifestError, Problem

Object = dict[str, Any]
OPTION_OF = {
    "training_cfg.run.name": "--job-name",
    "training_cfg.run.nodes": "--node-count",
    "training_cfg.entry_script": "--entry-script",
    "container": "--image",
    "cluster.instance_type": "--instance-type",
}
"""Options that set a required value, by its place in the file."""
CONFIG = "cluster.cluster_config"
PLACES = {
    "job_name": "training_cfg.run.name",
    "node_count": "training_cfg.run.nodes",
    "tasks_per_node": "training_cfg.run.ntasks_per_node",
    "entry_script": "training_cfg.entry_script",
    "script_args": "training_cfg.script_args",
    "image": "container",
    "instance_type": "cluster.instance_type",
    "namespace": f"{CONFIG}.namespace",
    "pull_policy": f"{CONFIG}.pullPolicy",
    "restart_policy": f"{CONFIG}.restartPolicy",
    "priority": f"{CONFIG}.priority_class_name",
    "service_account_name": f"{CONFIG}.service_account_name",
}
"""Places in the file that options set, by name of the option."""


class TrueFalse(StrEnum):
    """`true` and `false`: the CLI has no flags for them."""

    TRUE = "true"
    FALSE = "false"


@dataclass(frozen=True, slots=True)
class StartJobOptions:
    """Options that describe the job; empty or None if not given."""

    job_name: str = option(default="", help="Name of the job.")
    namespace: Namespace = ""
    image: str = option(default="", help="Image of the job's containers.")
    entry_script: str = option(default="", help="Training script.")
    script_args: str = option(default="", help="Arguments of the script.")
    node_count: int | None = option(min=1, help="Number of nodes.")
    tasks_per_node: int | None = option(min=1, help="Number of processes on each node.")
    instance_type: str = option(
        default="", help="Instance type of the nodes, such as ml.p5.48xlarge."
    )
    environment: str = option(
        default="", metavar="KEY=VALUE,...", help="Environment variables, also as JSON."
    )
    pull_policy: str = option(
        default="", help="Pull policy of the image: Always, IfNotPresent or Never."
    )
    restart_policy: str = option(
        default="", help="Restart policy of the pods: OnFailure, Always, Never or ExitCode."
    )
    auto_resume: TrueFalse | None = option(
        case_sensitive=False, help="Restart the job when it loses a node.", show_default=False
    )
    max_retry: int | None = option(
        min=0, help="Maximum number of these restarts.", show_default="1"
    )
    label_selector: str = option(default="", help="Labels that the job's nodes must have, as JSON.")
    deep_health_check_passed_nodes_only: TrueFalse = option(
        default=TrueFalse.FALSE,
        case_sensitive=False,
        help="Use only nodes that passed their deep check.",
    )
    queue_name: str = option(default="", help="Queue of Kueue.")
    priority: str = option(default="", help="Priority class; needs --queue-name.")
    service_account_name: str = option(default="", help="Service account of the pods.")
    persistent_volume_claims: str = option(
        default="", metavar="CLAIM:/PATH,...", help="Volume claims to mount, and where."
    )
    volumes: str = option(
        default="", metavar="NAME:/HOST:/PATH,...", help="Folders of the nodes to mount, and where."
    )


def manifest(file: Path | None, options: StartJobOptions) -> Object:
    """The PyTorchJob; SpecError lists all problems of file and options with their places."""
    from unbroken.operator.instance_types import instance_types  # reads a table

    content = _read(file) if file is not None else _blank()
    changed = _with_options(content, options)
    config, problems = read_config(changed)
    if problems:
        raise ManifestError(
            str(file or "the job"), [_hinted(problem, file) for problem in problems]
        )
    name = config.cluster.instance_type
    machine = instance_type(instance_types(), name if name.startswith("ml.") else f"ml.{name}")
    return pytorchjob(config, machine)


def _blank() -> Object:
    """The contents of an empty file, with the CLI's defaults."""
    config = {"label_selector": copy.deepcopy(SCHEDULABLE), "restartPolicy": "OnFailure"}
    return {
        "training_cfg": {"run": {}},
        "cluster": {"cluster_type": "k8s", "cluster_config": config},
        "env_vars": {"NCCL_DEBUG": "INFO"},
    }


def _read(file: Path) -> Object:
    documents = read_documents(str(file))
    content = documents[0] if len(documents) == 1 else None
    if not isinstance(content, dict):
        raise SpecError(f"{file} must be an object with training_cfg and cluster")
    return content


def _hinted(problem: Problem, file: Path | None) -> Problem:
    option = OPTION_OF.get(problem.path)
    if option is None or file is not None:
        return problem
    return Problem(problem.path, f"{problem.message} (give {option})", problem.reason)


def _with_options(content: Object, options: StartJobOptions) -> Object:
    content = copy.deepcopy(content)
    for name, place in PLACES.items():
        if (value := getattr(options, name)) not in ("", None):
            _set(content, place, value)
    if options.environment:
        _set(content, "env_vars", _variables(options.environment))
    if options.label_selector:
        labels = _json("--label-selector", options.label_selector)
        is_whole = {"required", "preferred", "weights"} & labels.keys()
        # Labels alone are required ones.
        selector = labels if is_whole else {"required": labels}
        _set(content, f"{CONFIG}.label_selector", selector)
    elif options.deep_health_check_passed_nodes_only is TrueFalse.TRUE:
        _set(content, f"{CONFIG}.label_selector", copy.deepcopy(CHECKED_ONLY))
    if options.queue_name:
        _below(content, f"{CONFIG}.custom_labels")[QUEUE] = options.queue_name
    if claims := options.persistent_volume_claims:
        result = _pieces("--persistent-volume-claims", claims, ("claimName", "mountPath"))
        _set(content, f"{CONFIG}.persistent_volume_claims", result)
    if options.volumes:
        keys = ("volumeName", "hostPath", "mountPath")
        _set(content, f"{CONFIG}.volumes", _pieces("--volumes", options.volumes, keys))
    _resume(content, options)
    return content


def _resume(content: Object, options: StartJobOptions) -> None:
    """Set auto-resume as the options say; without options, keep that of the file."""
    if options.max_retry is not None and options.auto_resume is not TrueFalse.TRUE:
        raise SpecError("--max-retry needs --auto-resume true")
    if options.auto_resume is None:
        return
    config = _below(content, CONFIG)
    given = config.get("annotations")
    kept = {
        key: value
        for key, value in (given if isinstance(given, dict) else {}).items()
        if key not in (AUTO_RESUME, MAX_RETRIES)
    }
    if options.auto_resume is TrueFalse.TRUE:
        # The CLI's own default (job.py).
        kept |= resume_annotations(1 if options.max_retry is None else options.max_retry)
        if config.get("restartPolicy") is None:
            config["restartPolicy"] = "OnFailure"
    config["annotations"] = kept


def _set(content: Object, place: str, value: Any) -> None:
    parent, _, key = place.rpartition(".")
    _below(content, parent)[key] = value


def _below(content: Object, place: str) -> Object:
    """The object at a place, created if it is missing.

    If another value is there, an object that is dropped: the reader reports the problem.
    """
    result = content
    for key in filter(None, place.split(".")):
        if result.get(key) is None:
            result[key] = {}
        inner = result[key]
        result = inner if isinstance(inner, dict) else {}
    return result


def _json(option: str, text: str) -> Object:
    try:
        result = json.loads(text)
    except ValueError as error:
        raise SpecError(f"{option} is not JSON: {error}") from error
    if not isinstance(result, dict):
        raise SpecError(f'{option}: must be an object, such as {{"KEY": "value"}}')
    return result


def _variables(text: str) -> Object:
    """Variables as JSON or as `KEY=VALUE,...`: help and code of the CLI differ."""
    if text.lstrip().startswith("{"):
        return _json("--environment", text)
    pairs = [piece.partition("=") for piece in text.split(",")]
    for name, equals, value in pairs:
        if not name or not equals:
            wanted = 'KEY=VALUE,... or as JSON, such as {"KEY": "value"}'
            raise SpecError(f"--environment {name}{equals}{value}: must be {wanted}")
    return {name: value for name, _, value in pairs}


def _pieces(option: str, text: str, keys: tuple[str, ...]) -> list[Object]:
    result = []
    for piece in text.split(","):
        parts = piece.split(":")
        if len(parts) != len(keys) or not all(parts):
            raise SpecError(f"{option} {piece}: must be {':'.join(keys)}")
        result.append(dict(zip(keys, parts, strict=True)))
    return result
