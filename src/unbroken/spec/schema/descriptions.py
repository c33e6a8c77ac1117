"""Texts of `kubectl explain` for each field: class and field name -> text for users."""

from __future__ import annotations

from collections.abc import Mapping

JOB = "A PyTorch training job that is kept running through failures."
INCIDENT = "One fault of a training job: what broke, what was done about it, and what it cost."

DESCRIPTIONS: Mapping[str, Mapping[str, str]] = {
    "JobSpec": {
        "nproc_per_node": "Number of workers of each pod, or auto, cpu or gpu.",
        "replica_specs": "Groups of equal pods.",
        "run_policy": "Limits of the job, and what happens when it ends.",
        "elastic_policy": "Sizes of an elastic job. Not supported yet: a job with it is refused.",
    },
    "ReplicaSpec": {
        "name": "Name of the group. Its pods are called JOB-NAME-NUMBER.",
        "template": "Template of the pods.",
        "replicas": "Number of pods that train.",
        "spares": "Number of spare pods. A spare takes the place of a lost pod.",
        "max_replicas": "For elastic jobs. In other jobs it must be absent or equal to replicas.",
    },
    "RunPolicy": {
        "clean_pod_policy": "Pods that are deleted when the job has ended.",
        "job_max_retry_count": (
            "Number of restarts after which the job fails. Absent: this field sets no limit."
        ),
        "active_deadline_seconds": "Seconds after its start at which the job fails.",
        "startup_deadline_seconds": "Seconds in which the job must start. After that it fails.",
        "fault_deadline_seconds": (
            "Seconds in which the job must run again after a fault. After that it fails."
        ),
        "suspend": "True stops the job and deletes its pods; false resumes it.",
        "workload_mode": "For elastic jobs. Not supported yet: a job with it is refused.",
        "ttl_seconds_after_finished": (
            "Seconds after its end until the job is deleted. -1 keeps it forever. So does 0, "
            "because HyperPod's clients write 0 into every job."
        ),
        "log_monitoring_configuration": "Log rules: they find hangs and slow jobs by their output.",
        "restart_policy": "Restarts before all pods are replaced, and before the job fails.",
    },
    "RestartPolicy": {
        "eval_period_seconds": "Seconds of the period in which restarts are counted.",
        "num_restart_before_full_job_restart": (
            "Restarts in a period after which all pods are replaced."
        ),
        "max_full_job_restarts": (
            "Times in a period that all pods may be replaced. After that the job fails."
        ),
        "max_num_repeat_offenders_to_avoid": (
            "Number of nodes with repeated faults that the job avoids when all pods are replaced."
        ),
        "scale_up_snooze_time_in_seconds": (
            "For elastic jobs: seconds after a restart in which the job does not grow."
        ),
    },
    "LogRule": {
        "name": "Name of the rule, shown with the fault.",
        "log_pattern": (
            "Regular expression that matches from the start of a line; a group in parentheses "
            "holds the number for metricThreshold."
        ),
        "expected_start_cut_off_in_seconds": (
            "Seconds from the start in which the first match must come."
        ),
        "expected_recurring_frequency_in_seconds": "Most seconds between two matches.",
        "stop_pattern": "Regular expression of the line after which the rule no longer applies.",
        "metric_threshold": "Threshold. The number in the line is compared with it.",
        "operator": "Comparison of the number in the line with metricThreshold. True is a fault.",
        "metric_evaluation_data_points": "Number of true comparisons in a row that make a fault.",
        "fault_on_match": "True: a match is a fault.",
    },
    "ElasticPolicy": {
        "min_replicas": "Least number of pods that train.",
        "max_replicas": "Greatest number of pods that train.",
        "replica_increment_step": "Number of pods by which the job grows or shrinks.",
        "replica_discrete_values": "Sizes that the job may have, instead of a step.",
        "scaling_timeout_in_seconds": "Seconds to wait before the job grows.",
        "graceful_shutdown_timeout_in_seconds": "Seconds that workers have to save their state.",
        "faulty_scale_down_timeout_in_seconds": (
            "Seconds to wait for another pod before the job shrinks."
        ),
    },
    "JobStatus": {
        "start_time": "When the operator first saw the job.",
        "completion_time": "When the job completed.",
        "conditions": "States of the job in order of progress.",
        "restart_count": "Restarts so far; the number of the newest attempt.",
        "restart_status": "The used part of the restart budget.",
        "master_addr": "Address of rank 0.",
        "master_port": "Port of rank 0's store.",
        "job_pods": "The pods of the job.",
        "latest_faulty": "What the latest fault was traced to.",
    },
    "Condition": {
        "type": "Name of the state: Created, PodsRunning, Running, Faulted, ...",
        "status": "True, False or Unknown.",
        "reason": "One word for the last change.",
        "message": "The last change, for people.",
        "last_transition_time": "When the status last changed.",
        "last_probe_time": "When the status was last checked.",
    },
    "RestartStatus": {
        "current_eval_period": "Number of the period.",
        "full_job_restart_count": "Times in this period that all pods were replaced.",
        "restart_count": (
            "Restarts since then. If the job sets no limit: restarts in a row without progress."
        ),
    },
    "FaultyPods": {
        "restart_type": (
            "PLR: the workers were restarted in their pods. JLR: all pods were replaced."
        ),
        "faulty_instance_id_list": "Names of the nodes.",
        "faulty_pod_list": "Names of the pods.",
        "faulty_rank_list": "Numbers of the ranks.",
    },
    "Incident": {
        "number": "Number of the incident within the job, from 1.",
        "attempt": "Number of the attempt that failed.",
        "culprit": "The first cause.",
        "fault": "Fault of the culprit, as the condition of the job names it.",
        "signals": "All signs of the fault, in order of time.",
        "remedy": "Level of recovery: in-process, process, pod or job.",
        "reason": "Why this remedy was chosen.",
        "detected_at": "When the first sign was seen.",
        "stopped_at": "When the last worker of the attempt had ended.",
        "ready_at": "When every agent was ready to start.",
        "examined_at": "When all ranks had been examined, before anything was stopped.",
        "started_at": "When every agent ran the next attempt.",
        "first_output_at": "When a worker of the next attempt first wrote something.",
        "progress_at": "When training resumed: the first step, or the first line of a kind that "
        "recurred in training; absent: not known.",
        "ended_at": "When the incident was closed.",
        "outcome": "recovered, or why not. Empty while the incident is open.",
        "confidence": "How sure the culprit is: certain, likely or unsure.",
        "blame": "Why this rank is the culprit.",
        "groups": "What the ranks were doing, the outliers first.",
        "progress_before": "The last sign of progress before the fault.",
        "step": "Newest step before the fault.",
        "resumed_step": "First step of the next attempt.",
        "step_seconds": "Seconds of a step before the fault.",
        "kept": "Number of ranks that kept their process. Absent: none.",
        "slowest": "The pod that each stage waited for last: stopped, ready, started.",
        "restored": "State that the ranks of the next attempt restored.",
        "steps_lost": "Steps between the newest step before the fault and the restored step.",
        "samples_repeated": "Samples used again, over all ranks. Absent: not known.",
        "samples_skipped": "Samples that the restored state has never seen. Absent: not known.",
        "replicas_agree": "Whether replicas restored the same bytes. Absent: not known.",
        "resumed": "What was restored, in a sentence.",
    },
    "Restored": {
        "ranks": "The ranks, as ranges.",
        "count": "Number of ranks.",
        "step": "Step after which the state was saved.",
        "source": (
            "Where the state came from: memory, buddy and its node rank, replica and its rank, "
            "or disk."
        ),
        "seconds": "Seconds of the slowest rank.",
        "slowest": "The slowest rank.",
        "checksum": "Checksum of the state.",
        "name": "Name of the snapshot.",
        "saved_attempt": "Attempt in which it was saved.",
    },
    "Symptom": {
        "at": "When it was seen.",
        "fault": "Class of the fault.",
        "text": "What was seen.",
        "pod": "The pod that it was seen in.",
        "node": "The node that it was seen on.",
        "rank": "The rank. Absent: the whole pod or node.",
        "evidence": "Last lines of the traceback or the log.",
        "exit_code": "Exit code of the worker; 128 + N if signal N ended it.",
        "fingerprint": "Identity of an exception: equal for the same exception at the same place.",
        "step": "Newest step that the rank had reported.",
        "rule": "Name of the log rule that was broken. Absent: none was.",
        "violation": "How the log rule was broken: Hang, Slow or Fault.",
    },
    "StackGroup": {
        "ranks": "The ranks, as ranges.",
        "count": "Number of ranks.",
        "doing": "What the ranks did.",
        "stack": "Stack of the main thread, innermost frame first.",
        "is_outlier": "Whether the others waited for them.",
    },
}


KINDS: Mapping[str, str] = {
    "Cluster": "Groups of equal machines, as the cluster API made them.",
    "Machine": "A machine of a cluster, which becomes a node. Repairs are ordered through it.",
    "NodeCheck": "A test of nodes, and its results.",
    "NodeRecord": "The faults of a node over all jobs, and its repairs.",
}

NODE_DESCRIPTIONS: Mapping[str, Mapping[str, str]] = {
    "ClusterSpec": {
        "name": "Name as requested. The object's name is the same in lower case.",
        "cluster_id": "Last part of the cluster's ARN: 12 of a-z and 0-9.",
        "request": "Members of the CreateCluster request, with all later updates.",
        "node_recovery": "Automatic: faulty nodes are repaired. None: they are not.",
        "tags": "Tags of the cluster.",
        "targets": "Number of machines of an instance group, if it differs from its InstanceCount.",
    },
    "ClusterStatus": {
        "phase": "ClusterStatus of the cluster API.",
        "message": "Reason of a failure.",
        "created_at": "When the cluster was requested.",
        "updated_at": "When the cluster last changed.",
        "state": "Groups, instances, operations and events.",
    },
    "MachineSpec": {
        "cluster": "Cluster that the machine belongs to.",
        "instance_group": "Instance group of the machine.",
        "instance_type": "Type such as ml.p5.48xlarge. It gives the machine's capacity.",
        "threads_per_core": "CPUs that the node offers for each core. 1: no hyper-threads.",
        "logical_id": "Identifier of the place in the group. A replacement keeps it.",
        "labels": "Labels of the node.",
        "taints": "Taints that the node has from the start.",
        "life_cycle": "Scripts to run on the machine.",
        "boots": "Number of reboots ordered. Raise it to order one more.",
        "resets": "Number of GPU resets ordered.",
    },
    "MachineTaint": {
        "key": "Key of the taint.",
        "effect": "NoSchedule, PreferNoSchedule or NoExecute.",
        "value": "Value of the taint.",
    },
    "LifeCycle": {
        "source": "Location of the scripts: s3://bucket/prefix, mapped to a folder.",
        "on_create": "Script that runs before the node joins.",
        "on_init_complete": "Script that runs after the node has joined.",
    },
    "MachineStatus": {
        "phase": "Phase of the machine.",
        "message": "Reason of the phase.",
        "boots": "Number of reboots done.",
        "resets": "Number of GPU resets done.",
        "index": "Number of the machine on its host, which decides its addresses.",
        "boot_id": "Identifier of the current boot.",
        "started_at": "When the machine last started.",
        "life_cycle": "Result of the newest script: Skipped, Running, Succeeded or Failed.",
        "life_cycle_log": "File with the output of the script.",
    },
    "NodeCheckSpec": {
        "nodes": "Nodes to test.",
        "kinds": "Kinds of tests to run.",
        "reason": "Who ordered the check, and why.",
        "is_forced": "True: nodes are tested although pods train there.",
        "timeout_seconds": "Seconds after which the check is given up.",
    },
    "NodeCheckStatus": {
        "phase": "Phase of the check.",
        "message": "Current activity, or the result.",
        "started_at": "When the first test began.",
        "ended_at": "When the last test ended.",
        "done": "Number of tests that have ended.",
        "total": "Number of all tests.",
        "results": "Result of each test.",
        "faulty": "Nodes that failed a test.",
    },
    "CheckResult": {
        "node": "Node that was tested.",
        "kind": "Kind of the test.",
        "test": "Name of the test.",
        "outcome": "pass, fail, or unknown if the test could not run.",
        "seconds": "Length of the test in seconds.",
        "message": "Result of the test in words.",
        "measured": "Measured value.",
        "expected": "Limit that the measured value is compared with.",
        "unit": "Unit of the measured value and the limit.",
        "peer": "Second node of a test of two nodes.",
        "backend": "Backend of a measured link: nccl (between GPUs) or gloo.",
    },
    "NodeRecordSpec": {
        "blame": "Faults that count against the node, oldest first.",
        "repair": "Repair in progress.",
        "history": "Repairs that have ended, oldest first.",
        "quarantined_at": "When the node was put in quarantine and stopped taking pods.",
        "quarantine_reason": "Reason of the quarantine.",
        "probation_until": "Time until which a new fault counts as a failure of the last repair.",
        "cleared_at": "When a person last cleared the node.",
        "cleared_by": "Person who cleared the node, and why.",
        "node_uid": "Uid of the Node that `machine` was taken from.",
        "machine": "Provider ID that the Node had when it joined; only this machine is repaired.",
    },
    "BlameEntry": {
        "at": "When the fault was seen.",
        "kind": "Kind of evidence: fault, incident, check, or lost (the node went silent).",
        "source": "Class of the fault, or the incident or check.",
        "text": "Evidence of the fault.",
        "weight": "Points of the fault when it was new. They decay.",
    },
    "RepairRecord": {
        "action": "Action that was ordered: reset, reboot or replace.",
        "reason": "Reason of the repair.",
        "asked_by": "Person or program that ordered the repair.",
        "state": "Stage of the repair.",
        "began_at": "When the repair was found necessary.",
        "fault": "Class of the fault.",
        "message": "What the repair waits for, or how it ended.",
        "tries": "Number of orders to the provider.",
        "withdrawn_at": "When the node was taken out of service and jobs began to leave.",
        "acted_at": "When the provider was given the order.",
        "returned_at": "When the node was ready again.",
        "ended_at": "When the repair ended.",
        "check": "NodeCheck that tested the node after the repair.",
        "replacement": "Node that replaced this one.",
        "boot_id": "Boot of the node at the time of the order.",
    },
}
