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
    "Signal": {
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
    },
    "StackGroup": {
        "ranks": "The ranks, as ranges.",
        "count": "Number of ranks.",
        "doing": "What the ranks did.",
        "stack": "Stack of the main thread, innermost frame first.",
        "is_outlier": "Whether the others waited for them.",
    },
}
