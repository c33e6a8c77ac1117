{{/* What the operator is started with, and which rights that calls for. */}}

{{- define "unbroken.operatorArguments" -}}
- --lease-namespace={{ include "unbroken.leaseNamespace" . }}
- --key-file=/etc/unbroken/key
- --key-secret={{ .Release.Namespace }}/{{ include "unbroken.name" . }}-operator-key
# The definitions come with the chart, and no right to change them.
- --without=definitions
{{- with .Values.operator.namespace }}
- --namespace={{ . }}
{{- end }}
{{- if not .Values.pytorchjobs.enabled }}
- --without=pytorchjobs
{{- end }}
{{- if not .Values.kueue.enabled }}
- --without=queues
{{- end }}
{{- if include "unbroken.nodes" . }}
- --node-recovery={{ .Values.nodes.recovery }}
- --node-provider={{ .Values.nodes.provider }}
{{- with .Values.nodes.command }}
- {{ printf "--node-command=%s" . | quote }}
{{- end }}
- --repair-share={{ .Values.nodes.share }}
{{- if .Values.nodes.dryRun }}
- --repair-dry-run
{{- end }}
{{- with .Values.checks.image }}
- --check-image={{ . }}
{{- end }}
{{- range $type, $speed := .Values.checks.linkBandwidth }}
- --check-link={{ $type }}={{ $speed }}
{{- end }}
{{- else if not .Values.operator.namespace }}
- --without=nodes
{{- end }}
{{- if .Values.metrics.enabled }}
- --metrics-host=0.0.0.0
- --metrics-port={{ .Values.metrics.port }}
{{- else }}
- --metrics-port=0
{{- end }}
{{- if include "unbroken.webhook" . }}
- --webhook-port={{ .Values.webhook.port }}
- --webhook-service={{ .Release.Namespace }}/{{ include "unbroken.name" . }}-webhook
{{- if .Values.webhook.clientCAConfigMap }}
- --webhook-client-ca=/etc/unbroken-webhook/ca.crt
{{- end }}
{{- end }}
{{- with .Values.operator.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "unbroken.operatorEnvironment" -}}
{{- if .Values.traces.endpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ .Values.traces.endpoint | quote }}}
- {name: OTEL_SERVICE_NAME, value: {{ .Values.traces.serviceName | quote }}}
{{- with .Values.traces.headersSecret }}
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom: {secretKeyRef: {name: {{ . }}, key: headers, optional: true}}
{{- end }}
{{- end }}
{{- with .Values.operator.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Of jobs: in every namespace, or in the one that is looked after. */}}
{{- define "unbroken.jobRules" -}}
- apiGroups: [sagemaker.amazonaws.com]
  resources: [hyperpodpytorchjobs]
  verbs: [list, watch, patch, delete]
- apiGroups: [sagemaker.amazonaws.com]
  resources: [hyperpodpytorchjobs/status]
  verbs: [patch]
# Pods and Secrets keep their job from going before them, which some servers ask a right for.
- apiGroups: [sagemaker.amazonaws.com]
  resources: [hyperpodpytorchjobs/finalizers]
  verbs: [update]
- apiGroups: [unbroken.dev]
  resources: [incidents]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
# The key of a job's agents, in a Secret that nothing here can read.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
# Lists: a kubelet says in an event alone why it cannot mount a pod's volume.
- apiGroups: [""]
  resources: [events]
  verbs: [list, create, patch]
{{- if .Values.pytorchjobs.enabled }}
- apiGroups: [kubeflow.org]
  resources: [pytorchjobs]
  verbs: [list, watch, patch]
{{- end }}
{{- if .Values.kueue.enabled }}
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status]
  verbs: [update]
{{- end }}
{{- end }}

{{/* Of what belongs to no namespace. */}}
{{- define "unbroken.clusterRules" -}}
# Which nodes are well, and requests to fence one (an annotation).
- apiGroups: [""]
  resources: [nodes]
  verbs: [get, list, watch, patch]
{{- if .Values.pytorchjobs.enabled }}
# Whether the API serves PyTorchJobs at all.
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  resourceNames: [pytorchjobs.kubeflow.org]
  verbs: [list, watch]
{{- end }}
{{- if include "unbroken.webhook" . }}
# The webhook keeps its own registration, with the certificate that it has made.
- apiGroups: [admissionregistration.k8s.io]
  resources: [validatingwebhookconfigurations]
  verbs: [create]
- apiGroups: [admissionregistration.k8s.io]
  resources: [validatingwebhookconfigurations]
  resourceNames: [unbroken-jobs]
  verbs: [get, list, watch, patch]
# Whether a user may create pods, before a pod of their template is tried as a dry run.
- apiGroups: [authorization.k8s.io]
  resources: [subjectaccessreviews]
  verbs: [create]
{{- end }}
{{- if .Values.kueue.enabled }}
# Whether there is a Kueue, what its flavors are, and which job goes first.
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
{{- end }}

{{/* Of repair, checks and clusters. */}}
{{- define "unbroken.nodeRules" -}}
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
  verbs: [list, watch, create, delete{{ if eq .Values.nodes.provider "machines" }}, get, patch{{ end }}]
{{- if eq .Values.nodes.provider "cluster-api" }}
- apiGroups: [cluster.x-k8s.io]
  resources: [machines]
  verbs: [list, patch, delete]
{{- else if eq .Values.nodes.provider "karpenter" }}
- apiGroups: [karpenter.sh]
  resources: [nodeclaims]
  verbs: [list, patch, delete]
{{- end }}
{{- end }}
