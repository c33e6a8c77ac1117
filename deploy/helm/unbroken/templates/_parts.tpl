{{/* Written by tools/operator_parts.py from src/unbroken/operator/parts.py; do not edit. */}}

{{/* Repairs and checks nodes, and runs Clusters. `true` or empty. */}}
{{- define "unbroken.nodes" -}}
{{- if and .Values.nodes.enabled (not .Values.operator.namespace) }}true{{ end }}
{{- end }}

{{/* Resumes PyTorchJobs (auto-resume). `true` or empty. */}}
{{- define "unbroken.pytorchjobs" -}}
{{- if .Values.pytorchjobs.enabled }}true{{ end }}
{{- end }}

{{/* Resumes TrainJobs (auto-resume). `true` or empty. */}}
{{- define "unbroken.trainjobs" -}}
{{- if .Values.trainjobs.enabled }}true{{ end }}
{{- end }}

{{/* Resumes JobSets (auto-resume). `true` or empty. */}}
{{- define "unbroken.jobsets" -}}
{{- if .Values.jobsets.enabled }}true{{ end }}
{{- end }}

{{/* Resumes RayJobs and RayClusters (auto-resume). `true` or empty. */}}
{{- define "unbroken.ray" -}}
{{- if .Values.ray.enabled }}true{{ end }}
{{- end }}

{{/* Runs TrainJobs of the runtime unbroken-torch as HyperPodPyTorchJobs. `true` or empty. */}}
{{- define "unbroken.trainer" -}}
{{- if .Values.trainer.runtime }}true{{ end }}
{{- end }}

{{/* Lets jobs wait in Kueue's queues. `true` or empty. */}}
{{- define "unbroken.queues" -}}
{{- if .Values.kueue.enabled }}true{{ end }}
{{- end }}

{{/* Refuses jobs that cannot run when they are applied. `true` or empty. */}}
{{- define "unbroken.webhook" -}}
{{- if and .Values.webhook.enabled (not .Values.operator.namespace) }}true{{ end }}
{{- end }}

{{/* Serves SageMaker's operations on clusters. `true` or empty. */}}
{{- define "unbroken.cluster-api" -}}
{{- if .Values.clusterApi.enabled }}true{{ end }}
{{- end }}

{{/* Gives the reports of agents to the live page of the cluster. `true` or empty. */}}
{{- define "unbroken.reports" -}}
{{- if .Values.page.enabled }}true{{ end }}
{{- end }}

{{- define "unbroken.without" -}}
- --without=definitions
{{- if not (include "unbroken.nodes" .) }}
- --without=nodes
{{- end }}
{{- if not (include "unbroken.pytorchjobs" .) }}
- --without=pytorchjobs
{{- end }}
{{- if not (include "unbroken.trainjobs" .) }}
- --without=trainjobs
{{- end }}
{{- if not (include "unbroken.jobsets" .) }}
- --without=jobsets
{{- end }}
{{- if not (include "unbroken.ray" .) }}
- --without=ray
{{- end }}
{{- if not (include "unbroken.trainer" .) }}
- --without=trainer
{{- end }}
{{- if not (include "unbroken.queues" .) }}
- --without=queues
{{- end }}
{{- end }}

{{- define "unbroken.jobRules" -}}
# Runs HyperPodPyTorchJobs.
- apiGroups: [sagemaker.amazonaws.com]
  resources: [hyperpodpytorchjobs]
  verbs: [list, watch, patch, delete]
- apiGroups: [sagemaker.amazonaws.com]
  resources: [hyperpodpytorchjobs/status]
  verbs: [patch]
- apiGroups: [sagemaker.amazonaws.com]
  resources: [hyperpodpytorchjobs/finalizers]
  verbs: [update]
- apiGroups: [unbroken.dev]
  resources: [incidents]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, create, delete]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [events]
  verbs: [list, create, patch]
{{- if include "unbroken.pytorchjobs" . }}
# Resumes PyTorchJobs (auto-resume).
- apiGroups: [kubeflow.org]
  resources: [pytorchjobs]
  verbs: [list, watch, patch]
{{- end }}
{{- if include "unbroken.trainjobs" . }}
# Resumes TrainJobs (auto-resume).
- apiGroups: [trainer.kubeflow.org]
  resources: [trainjobs]
  verbs: [list, watch, patch]
{{- end }}
{{- if include "unbroken.jobsets" . }}
# Resumes JobSets (auto-resume).
- apiGroups: [jobset.x-k8s.io]
  resources: [jobsets]
  verbs: [list, watch, patch]
{{- end }}
{{- if include "unbroken.ray" . }}
# Resumes RayJobs and RayClusters (auto-resume).
- apiGroups: [ray.io]
  resources: [rayclusters]
  verbs: [list, watch, patch]
- apiGroups: [ray.io]
  resources: [rayjobs]
  verbs: [list, watch, patch]
- apiGroups: [ray.io]
  resources: [rayjobs/status]
  verbs: [patch]
{{- end }}
{{- if include "unbroken.trainer" . }}
# Runs TrainJobs of the runtime unbroken-torch as HyperPodPyTorchJobs.
- apiGroups: [trainer.kubeflow.org]
  resources: [trainjobs]
  verbs: [list, watch]
- apiGroups: [trainer.kubeflow.org]
  resources: [trainjobs/finalizers]
  verbs: [update]
- apiGroups: [sagemaker.amazonaws.com]
  resources: [hyperpodpytorchjobs]
  verbs: [create]
- apiGroups: [""]
  resources: [pods]
  verbs: [patch]
{{- end }}
{{- if include "unbroken.queues" . }}
# Lets jobs wait in Kueue's queues.
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status]
  verbs: [update]
{{- end }}
{{- end }}

{{- define "unbroken.clusterRules" -}}
# Runs HyperPodPyTorchJobs.
- apiGroups: [""]
  resources: [nodes]
  verbs: [get, list, watch, patch]
{{- if include "unbroken.nodes" . }}
# Repairs and checks nodes, and runs Clusters.
- apiGroups: [unbroken.dev]
  resources: [noderecords]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [unbroken.dev]
  resources: [nodechecks]
  verbs: [get, list, watch, create, delete]
- apiGroups: [unbroken.dev]
  resources: [nodechecks/status]
  verbs: [patch]
- apiGroups: [unbroken.dev]
  resources: [clusters]
  verbs: [get, list, watch, update, patch]
- apiGroups: [unbroken.dev]
  resources: [clusters/status]
  verbs: [update]
- apiGroups: [unbroken.dev]
  resources: [machines]
  verbs: [list, watch, create, delete]
{{- if eq .Values.nodes.provider "machines" }}
- apiGroups: [unbroken.dev]
  resources: [machines]
  verbs: [get, patch]
{{- end }}
{{- if eq .Values.nodes.provider "cluster-api" }}
- apiGroups: [cluster.x-k8s.io]
  resources: [machines]
  verbs: [list, patch, delete]
{{- end }}
{{- if eq .Values.nodes.provider "karpenter" }}
- apiGroups: [karpenter.sh]
  resources: [nodeclaims]
  verbs: [list, patch, delete]
{{- end }}
{{- if eq .Values.nodes.provider "aws" }}
- apiGroups: [unbroken.dev]
  resources: [noderecords]
  verbs: [get]
{{- end }}
{{- end }}
{{- if include "unbroken.pytorchjobs" . }}
# Resumes PyTorchJobs (auto-resume).
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  resourceNames: [pytorchjobs.kubeflow.org]
  verbs: [list, watch]
{{- end }}
{{- if include "unbroken.trainjobs" . }}
# Resumes TrainJobs (auto-resume).
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  resourceNames: [trainjobs.trainer.kubeflow.org]
  verbs: [list, watch]
{{- end }}
{{- if include "unbroken.jobsets" . }}
# Resumes JobSets (auto-resume).
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  resourceNames: [jobsets.jobset.x-k8s.io]
  verbs: [list, watch]
{{- end }}
{{- if include "unbroken.ray" . }}
# Resumes RayJobs and RayClusters (auto-resume).
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  resourceNames: [rayclusters.ray.io]
  verbs: [list, watch]
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  resourceNames: [rayjobs.ray.io]
  verbs: [list, watch]
{{- end }}
{{- if include "unbroken.trainer" . }}
# Runs TrainJobs of the runtime unbroken-torch as HyperPodPyTorchJobs.
- apiGroups: [trainer.kubeflow.org]
  resources: [clustertrainingruntimes]
  resourceNames: [unbroken-torch]
  verbs: [list, watch]
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  resourceNames: [trainjobs.trainer.kubeflow.org]
  verbs: [list, watch]
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  resourceNames: [clustertrainingruntimes.trainer.kubeflow.org]
  verbs: [list, watch]
{{- end }}
{{- if include "unbroken.queues" . }}
# Lets jobs wait in Kueue's queues.
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  resourceNames: [workloads.kueue.x-k8s.io]
  verbs: [list, watch]
- apiGroups: [kueue.x-k8s.io]
  resources: [resourceflavors]
  verbs: [list, watch]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloadpriorityclasses]
  verbs: [get]
- apiGroups: [scheduling.k8s.io]
  resources: [priorityclasses]
  verbs: [get, list]
{{- end }}
{{- if include "unbroken.webhook" . }}
# Refuses jobs that cannot run when they are applied.
- apiGroups: [admissionregistration.k8s.io]
  resources: [validatingwebhookconfigurations]
  verbs: [create]
- apiGroups: [admissionregistration.k8s.io]
  resources: [validatingwebhookconfigurations]
  resourceNames: [unbroken-jobs]
  verbs: [get, list, watch, patch]
- apiGroups: [authorization.k8s.io]
  resources: [subjectaccessreviews]
  verbs: [create]
{{- end }}
{{- if include "unbroken.reports" . }}
# Gives the reports of agents to the live page of the cluster.
- apiGroups: [authentication.k8s.io]
  resources: [tokenreviews]
  verbs: [create]
{{- end }}
{{- end }}

{{- define "unbroken.leaseRules" -}}
# Runs HyperPodPyTorchJobs.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [unbroken-operator]
  verbs: [get, list, watch, update]
{{- end }}

{{- define "unbroken.keyRules" -}}
# Runs HyperPodPyTorchJobs.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
{{- end }}

{{- define "unbroken.checkRules" -}}
{{- if include "unbroken.nodes" . }}
# Repairs and checks nodes, and runs Clusters.
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
{{- end }}
{{- end }}

{{- define "unbroken.clusterApiRules" -}}
{{- if include "unbroken.cluster-api" . }}
# Serves SageMaker's operations on clusters.
- apiGroups: [unbroken.dev]
  resources: [clusters]
  verbs: [get, list, create, update, delete]
- apiGroups: [unbroken.dev]
  resources: [clusters/status]
  verbs: [update]
- apiGroups: [unbroken.dev]
  resources: [machines]
  verbs: [list, delete]
- apiGroups: [unbroken.dev]
  resources: [noderecords]
  verbs: [get]
- apiGroups: [""]
  resources: [nodes]
  verbs: [get, patch]
{{- end }}
{{- end }}
