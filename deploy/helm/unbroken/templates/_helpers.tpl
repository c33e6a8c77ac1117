{{/* Names, labels and images that several manifests share. */}}

{{- define "unbroken.name" -}}
{{- if contains "unbroken" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-unbroken{{ end }}
{{- end }}

{{/* Labels of every object; the argument is {root, component}. */}}
{{- define "unbroken.labels" -}}
{{ include "unbroken.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/part-of: unbroken
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "unbroken.selector" -}}
app.kubernetes.io/name: {{ .component }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{- define "unbroken.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest }}{{ $image.repository }}@{{ $image.digest }}
{{- else }}{{ $image.repository }}:{{ $image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{/* Pod Security Standard `restricted`. */}}
{{- define "unbroken.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "unbroken.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "unbroken.leaseNamespace" -}}
{{- .Values.operator.leaseNamespace | default (.Values.operator.namespace | default "kube-system") }}
{{- end }}

{{- define "unbroken.clusterApiScheme" -}}
{{- if .Values.clusterApi.tls.enabled }}https{{ else }}http{{ end }}
{{- end }}

{{/* Takes rules in CEL out of a definition, in place. */}}
{{- define "unbroken.withoutRules" -}}
{{- if kindIs "map" . -}}
{{- $_ := unset . "x-kubernetes-validations" -}}
{{- range $value := . }}{{ include "unbroken.withoutRules" $value }}{{ end -}}
{{- else if kindIs "slice" . -}}
{{- range $value := . }}{{ include "unbroken.withoutRules" $value }}{{ end -}}
{{- end -}}
{{- end }}

{{/* Values that contradict each other; the schema has looked at each alone. */}}
{{- define "unbroken.check" -}}
{{- if and (eq .Values.nodes.provider "command") (not .Values.nodes.command) }}
{{- fail "nodes.provider is command: say which in nodes.command" }}
{{- end }}
{{- if and .Values.nodes.command (ne .Values.nodes.provider "command") }}
{{- fail (printf "nodes.command is only called by nodes.provider command, which is %s" .Values.nodes.provider) }}
{{- end }}
{{- if and .Values.clusterApi.enabled (not .Values.clusterApi.credentialsSecret) }}
{{- fail "clusterApi.enabled: name in clusterApi.credentialsSecret a Secret whose key `credentials` holds the keys that may call it" }}
{{- end }}
{{- if and .Values.clusterApi.tls.secretName (not .Values.clusterApi.tls.enabled) }}
{{- fail "clusterApi.tls.secretName has no effect without clusterApi.tls.enabled" }}
{{- end }}
{{- if and .Values.clusterApi.enabled (not (include "unbroken.nodes" .)) }}
{{- fail "clusterApi.enabled: the work of clusters is done by an operator with nodes.enabled and without operator.namespace" }}
{{- end }}
{{- if and .Values.notifications.pageURL (not .Values.notifications.urlSecret) }}
{{- fail "notifications.pageURL has no effect without notifications.urlSecret" }}
{{- end }}
{{- if and .Values.traces.headersSecret (not .Values.traces.endpoint) }}
{{- fail "traces.headersSecret: say in traces.endpoint where to" }}
{{- end }}
{{- if and .Values.nodeDaemon.enabled (eq .Values.nodeDaemon.namespace .Release.Namespace) .Values.nodeDaemon.createNamespace }}
{{- fail (printf "nodeDaemon.namespace is the release's own, %s: its pods are privileged and the operator's are not; name another, or set nodeDaemon.createNamespace=false" .Release.Namespace) }}
{{- end }}
{{- end }}

{{- /* Values of the node daemon's metrics; empty if there are none. */ -}}
{{- define "unbroken.nodeMetrics" -}}
{{- with .Values.nodeDaemon }}
{{- if and .enabled .metrics.enabled (or .metrics.host .metrics.gpus) }}
{{- toYaml .metrics }}
{{- end }}
{{- end }}
{{- end }}
