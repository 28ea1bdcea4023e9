{{- define "strait.name" -}}
{{- .Values.name | default .Release.Name -}}
{{- end }}

{{- define "strait.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end }}

{{- define "strait.network" -}}
{{- required "`network` is required: the network of this cluster, as its namespace istio-system has it in the label topology.istio.io/network" .Values.network -}}
{{- end }}

{{- define "strait.cluster" -}}
{{- required "`cluster` is required: the name by which istiod knows this cluster, its variable CLUSTER_ID" .Values.cluster -}}
{{- end }}

{{- define "strait.selector" -}}
app: {{ include "strait.name" . }}
gateway.networking.k8s.io/gateway-name: {{ include "strait.name" . }}
{{- end }}

{{- define "strait.labels" -}}
app.kubernetes.io/name: strait
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: istio
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app: {{ include "strait.name" . }}
topology.istio.io/network: {{ include "strait.network" . }}
{{- with .Values.revision }}
istio.io/rev: {{ . }}
{{- end }}
{{- with .Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "strait.metadata" -}}
name: {{ include "strait.name" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "strait.labels" . | nindent 2 }}
{{- with .Values.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Variables that both ways have. */ -}}
{{- define "strait.env" -}}
- name: TERMINATION_GRACE_PERIOD_SECONDS
  value: {{ .Values.terminationGracePeriodSeconds | quote }}
{{- with .Values.trustDomains }}
- name: TRUST_DOMAINS
  value: {{ join "," . | quote }}
{{- end }}
{{- range $name, $value := .Values.env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{- /* Whether the configuration watches objects of the API server by the pod's service account. */ -}}
{{- define "strait.watches" -}}
{{- $discovery := .Values.config.discovery | default dict -}}
{{- $exposure := .Values.config.exposure | default dict -}}
{{- or (eq ($discovery.kind | default "") "kubernetes") (hasKey $exposure "kubernetes") -}}
{{- end }}

{{- define "strait.configName" -}}
{{- printf "%s-config" (include "strait.name" .) -}}
{{- end }}

{{- define "strait.configVolume" -}}
- name: strait
  configMap:
    name: {{ include "strait.configName" . }}
    optional: true
{{- end }}

{{- define "strait.autoscaler" -}}
minReplicas: {{ .Values.autoscaling.minReplicas }}
maxReplicas: {{ .Values.autoscaling.maxReplicas }}
metrics:
  - type: Resource
    resource:
      name: cpu
      target:
        type: Utilization
        averageUtilization: {{ .Values.autoscaling.targetCPUUtilizationPercentage }}
  {{- with .Values.autoscaling.targetTunnels }}
  - type: Pods
    pods:
      metric:
        name: strait_tunnels_open
      target:
        type: AverageValue
        averageValue: {{ . | quote }}
  {{- end }}
{{- with .Values.autoscaling.autoscaleBehavior }}
behavior:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
