"""What `kubectl explain` says of each field: class and field name -> text for users."""

from __future__ import annotations

from collections.abc import Mapping

JOB = "A PyTorch training job that is kept running through failures."
INCIDENT = "One fault of a training job: what broke, what was done about it, and what it cost."

DESCRIPTIONS: Mapping[str, Mapping[str, str]] = {
    "JobSpec": {
        "nproc_per_node": "Workers of each pod: auto, cpu, gpu or a number.",
        "replica_specs": "Groups of equal pods.",
        "run_policy": "Limits of the job's life, and what happens at its end.",
        "elastic_policy": "Sizes that the job may have. Not supported yet: refused.",
    },
    "ReplicaSpec": {
        "name": "Part of the names of its pods, <job>-<name>-<number>.",
        "template": "The pod to run.",
        "replicas": "Pods that train.",
        "spares": "Pods more that wait, to take the place of one that is lost.",
        "max_replicas": "For elastic jobs; else absent or equal to replicas.",
    },
    "RunPolicy": {
        "clean_pod_policy": "Which pods are deleted when the job has ended.",
        "job_max_retry_count": "Restarts of the workers in their pods before the job fails.",
        "active_deadline_seconds": "Seconds from its start after which the job fails.",
        "startup_deadline_seconds": "Longest time that the job may take to start.",
        "fault_deadline_seconds": "Longest time that the job may take to run again after a fault.",
        "suspend": "Stop the job and delete its pods until this is false again.",
        "workload_mode": "For elastic jobs. Not supported yet: refused.",
        "ttl_seconds_after_finished": (
            "Seconds after its end until the job is deleted. It is kept for ever with -1, and "
            "with 0, which stock clients write into every job."
        ),
        "log_monitoring_configuration": "Rules by which output shows a job that hangs or is slow.",
        "restart_policy": "How many restarts lead to the next rung, and to failure.",
    },
    "RestartPolicy": {
        "eval_period_seconds": "Length of the period in which restarts are counted.",
        "num_restart_before_full_job_restart": (
            "Restarts in a period after which all pods are made anew."
        ),
        "max_full_job_restarts": "Times in a period that all pods may be made anew.",
        "max_num_repeat_offenders_to_avoid": (
            "Nodes with repeated faults that are left out when all pods are made anew."
        ),
        "scale_up_snooze_time_in_seconds": "For elastic jobs: time after a restart without growth.",
    },
    "LogRule": {
        "name": "Name of the rule, shown with the fault.",
        "log_pattern": (
            "Regular expression that matches from the start of a line; a group in parentheses "
            "holds the number for metricThreshold."
        ),
        "expected_start_cut_off_in_seconds": "Time from the start to the first match, at most.",
        "expected_recurring_frequency_in_seconds": "Time between two matches, at most.",
        "stop_pattern": "Regular expression of the line that ends the rule.",
        "metric_threshold": "Number that the one in the line is compared with.",
        "operator": "Comparison of the number in the line with metricThreshold that is a fault.",
        "metric_evaluation_data_points": "Such comparisons in a row that make the fault.",
        "fault_on_match": "A match is a fault at once.",
    },
    "ElasticPolicy": {
        "min_replicas": "Pods that must train at least.",
        "max_replicas": "Pods that may train at most.",
        "replica_increment_step": "Pods by which the job grows or shrinks.",
        "replica_discrete_values": "Sizes that the job may have, in the place of a step.",
        "scaling_timeout_in_seconds": "Time to wait before growing.",
        "graceful_shutdown_timeout_in_seconds": "Time that workers have to save their state.",
        "faulty_scale_down_timeout_in_seconds": (
            "Time to wait for another pod before going on with fewer."
        ),
    },
    "JobStatus": {
        "start_time": "When the operator first saw the job.",
        "completion_time": "When the job completed.",
        "conditions": "States of the job in order of progress.",
        "restart_count": "Restarts so far; the number of the newest attempt.",
        "restart_status": "The part of the restart budget that is used up.",
        "master_addr": "Address of rank 0.",
        "master_port": "Port of rank 0's store.",
        "job_pods": "The pods of the job.",
        "latest_faulty": "What the latest fault was traced to.",
    },
    "Condition": {
        "type": "State that this is about: Created, PodsRunning, Running, Faulted, ...",
        "status": "True, False or Unknown.",
        "reason": "One word for the last change.",
        "message": "The last change, for people.",
        "last_transition_time": "When the status last changed.",
        "last_probe_time": "When the status was last looked at.",
    },
    "RestartStatus": {
        "current_eval_period": "Number of the period.",
        "full_job_restart_count": "Times in it that all pods were made anew.",
        "restart_count": (
            "Restarts in it since then. Where the job sets no limit: restarts in a row without"
            " progress."
        ),
    },
    "FaultyPods": {
        "restart_type": "PLR: workers restarted in their pods; JLR: all pods made anew.",
        "faulty_instance_id_list": "Nodes.",
        "faulty_pod_list": "Pods.",
        "faulty_rank_list": "Ranks.",
    },
    "Incident": {
        "number": "1, 2, 3, ... within the job.",
        "attempt": "The attempt that broke.",
        "culprit": "The first cause.",
        "signals": "All signs of the fault, in order of time.",
        "remedy": "What was done: the rung of the ladder.",
        "reason": "Why that.",
        "detected_at": "When the first sign was seen.",
        "stopped_at": "When no worker of the attempt lived any more.",
        "ready_at": "When every agent was ready to start.",
        "examined_at": "When all ranks had been looked at, before anything was stopped.",
        "started_at": "When every agent ran the next attempt.",
        "progress_at": "When a worker of the next attempt first wrote something.",
        "ended_at": "When the incident was closed.",
        "outcome": "recovered, or why not; empty while open.",
        "confidence": "How sure the culprit is: certain, likely or unsure.",
        "blame": "Why this rank is the culprit.",
        "groups": "What the ranks were doing, the outliers first.",
        "progress_before": "The last sign of progress before the fault.",
        "step": "Newest step before the fault.",
        "resumed_step": "First step of the next attempt.",
        "step_seconds": "What a step took before the fault.",
        "kept": "Ranks whose process has lived on; absent: none has.",
        "slowest": "The pod that each stage waited for last: stopped, ready, started.",
        "restored": "What the ranks of the next attempt went on with.",
        "steps_lost": "Steps between the newest before the fault and what was restored.",
        "samples_repeated": "Samples given again, by all ranks together; absent: not known.",
        "samples_skipped": "Samples that the state in use has never seen; absent: not known.",
        "replicas_agree": "Whether replicas restored the same bytes; absent: not known.",
        "resumed": "What was restored, in a sentence.",
    },
    "Restored": {
        "ranks": "The ranks, as ranges.",
        "count": "How many.",
        "step": "After which it was saved.",
        "source": "memory, buddy and its node rank, replica and its rank, or disk.",
        "seconds": "Of the rank that took longest.",
        "slowest": "That rank.",
        "checksum": "Of the state's bytes.",
        "name": "Of the snapshot.",
        "saved_attempt": "Attempt in which it was saved.",
    },
    "Signal": {
        "at": "When it was seen.",
        "fault": "Class of the fault.",
        "text": "What was seen.",
        "pod": "The pod that it was seen in.",
        "node": "The node that it was seen on.",
        "rank": "The rank; absent: the whole pod or node.",
        "evidence": "Last lines of the traceback or the log.",
        "exit_code": "Of the worker; 128 + n where signal n ended it.",
        "fingerprint": "Same for the same exception at the same place.",
        "step": "Newest step that the rank had told.",
    },
    "StackGroup": {
        "ranks": "The ranks, as ranges.",
        "count": "How many.",
        "doing": "What they did, in words.",
        "stack": "Of the main thread, innermost first.",
        "is_outlier": "Whether the others waited for them.",
    },
}
