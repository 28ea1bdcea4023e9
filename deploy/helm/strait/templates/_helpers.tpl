{{- define "strait.name" -}}
{{- .Values.name | default .Release.Name -}}
{{- end }}

{{- define "strait.image" -}}
{{- $repository := required "`image.repository` is required: where the image was pushed to, such as REGISTRY/strait" .Values.image.repository -}}
{{- printf "%s:%s" $repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end }}

{{- define "strait.network" -}}
{{- required "`network` is required: the network of this cluster, as its namespace istio-system has it in the label topology.istio.io/network" .Values.network -}}
{{- end }}

{{- define "strait.cluster" -}}
{{- required "`cluster` is required: the name by which istiod knows this cluster, its variable CLUSTER_ID" .Values.cluster -}}
{{- end }}

{{- define "strait.selector" -}}
app: {{ include "strait.name" . | quote }}
gateway.networking.k8s.io/gateway-name: {{ include "strait.name" . | quote }}
{{- end }}

{{- define "strait.labels" -}}
app.kubernetes.io/name: strait
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: istio
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app: {{ include "strait.name" . | quote }}
topology.istio.io/network: {{ include "strait.network" . | quote }}
{{- with .Values.revision }}
istio.io/rev: {{ . | quote }}
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
  {{- with .Values.autoscaling }}
  {{- range $name, $value := dict "process_open_fds" .targetDescriptors "strait_tunnels_open" .targetTunnels }}
  {{- with $value }}
  - type: Pods
    pods:
      metric:
        name: {{ $name }}
      target:
        type: AverageValue
        averageValue: {{ . | int64 | quote }}
  {{- end }}
  {{- end }}
  {{- end }}
{{- with .Values.autoscaling.autoscaleBehavior }}
behavior:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Where the pods run, and their priority. It begins with a comment, as all values may be empty. */ -}}
{{- define "strait.scheduling" -}}
# Where the pods run.
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{ toYaml . | nindent 4 | trim }}
    {{- if not .labelSelector }}
    labelSelector:
      matchLabels:
        gateway.networking.k8s.io/gateway-name: {{ include "strait.name" $ | quote }}
    {{- end }}
  {{- end }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* The Service, without its selector and the ports that every gateway has. */ -}}
{{- define "strait.service" -}}
{{- /* A Gateway may choose another type by an annotation, which istiod knows. */ -}}
{{- if not (and .Values.managed (eq .Values.service.type "LoadBalancer")) }}
type: {{ .Values.service.type }}
{{- end }}
{{- with .Values.service.loadBalancerIP }}
loadBalancerIP: {{ . | quote }}
{{- end }}
{{- with .Values.service.loadBalancerClass }}
loadBalancerClass: {{ . | quote }}
{{- end }}
{{- with .Values.service.loadBalancerSourceRanges }}
loadBalancerSourceRanges:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.service.externalTrafficPolicy }}
externalTrafficPolicy: {{ . }}
{{- end }}
{{- with .Values.service.externalIPs }}
externalIPs:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.service.ipFamilyPolicy }}
ipFamilyPolicy: {{ . }}
{{- end }}
{{- with .Values.service.ipFamilies }}
ipFamilies:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
