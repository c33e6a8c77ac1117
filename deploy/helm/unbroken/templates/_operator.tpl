{{/* Arguments and environment of the operator.  Its rights are in _parts.tpl. */}}

{{- define "unbroken.operatorArguments" -}}
- --lease-namespace={{ include "unbroken.leaseNamespace" . }}
- --key-file=/etc/unbroken/key
- --key-secret={{ .Release.Namespace }}/{{ include "unbroken.name" . }}-operator-key
- --agent-image={{ include "unbroken.image" . }}
- --agent-authentication={{ .Values.agentAuthentication }}
- --resume-retries={{ .Values.autoResume.retries }}
{{- with .Values.nodes.deadAfterSeconds }}
- --dead-after={{ . }}
{{- end }}
{{ include "unbroken.without" . }}
{{- with .Values.operator.namespace }}
- --namespace={{ . }}
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
{{- if .Values.checks.logsClaim }}
- --check-logs=/var/log/unbroken-checks
{{- end }}
{{- range $type, $speed := .Values.checks.linkBandwidth }}
- --check-link={{ $type }}={{ $speed }}
{{- end }}
{{- range $type, $speed := .Values.checks.nodeBandwidth }}
- --check-node-link={{ $type }}={{ $speed }}
{{- end }}
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
{{- if .Values.page.enabled }}
- --reports-host=0.0.0.0
- --reports-port={{ .Values.page.reportsPort }}
- --reports-reader={{ .Release.Namespace }}/{{ include "unbroken.name" . }}-page
{{- end }}
{{- if .Values.notifications.urlSecret }}
- --notify-file=/etc/unbroken-notify/url
- --notify-form={{ .Values.notifications.form }}
{{- with .Values.notifications.pageURL }}
- {{ printf "--notify-page=%s" . | quote }}
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
