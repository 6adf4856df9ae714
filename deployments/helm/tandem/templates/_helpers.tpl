{{- define "tandem.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "tandem.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- $name := include "tandem.name" . }}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "tandem.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride }}
{{- end }}

{{- define "tandem.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "tandem.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name is not set: name the existing service account, or leave serviceAccount.create on" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "tandem.controller.name" -}}
{{ include "tandem.fullname" . }}-controller
{{- end }}

{{/* Name of the webhook's Service, Secret and configuration. */}}
{{- define "tandem.webhook.name" -}}
{{ include "tandem.fullname" . }}-webhook
{{- end }}

{{- define "tandem.controller.serviceAccountName" -}}
{{- if .Values.controller.serviceAccount.create }}
{{- default (include "tandem.controller.name" .) .Values.controller.serviceAccount.name }}
{{- else }}
{{- required "controller.serviceAccount.name is not set: name the existing service account, or leave controller.serviceAccount.create on" .Values.controller.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* Flags of both agent and controller. */}}
{{- define "tandem.instanceLabels" -}}
app.kubernetes.io/name: {{ include "tandem.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{/* Whether the agents label their nodes. */}}
{{- define "tandem.gfd" -}}
{{- dig "enabled" true (default dict .Values.gfd) }}
{{- end }}

{{/* Annotations of what runs after `helm uninstall`, in the order of weights. A failed Job stays, for its log. */}}
{{- define "tandem.afterUninstall" -}}
helm.sh/hook: post-delete
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}

{{- define "tandem.selectorLabels" -}}
{{ include "tandem.instanceLabels" . }}
app.kubernetes.io/component: kubelet-plugin
{{- end }}

{{- define "tandem.controller.selectorLabels" -}}
{{ include "tandem.instanceLabels" . }}
app.kubernetes.io/component: controller
{{- end }}

{{- define "tandem.releaseLabels" -}}
app.kubernetes.io/part-of: tandem
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "tandem.labels" -}}
{{ include "tandem.selectorLabels" . }}
{{ include "tandem.releaseLabels" . }}
{{- end }}

{{- define "tandem.controller.labels" -}}
{{ include "tandem.controller.selectorLabels" . }}
{{ include "tandem.releaseLabels" . }}
{{- end }}

{{- define "tandem.image" -}}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}
{{- end }}

{{/* privileged, runtimeClass or none */}}
{{- define "tandem.access" -}}
{{- default (ternary "none" "privileged" (ne .Values.simulated.profile "")) .Values.access }}
{{- end }}

{{- define "tandem.runtimeClassName" -}}
{{- default (ternary "nvidia" "" (eq (include "tandem.access" .) "runtimeClass")) .Values.runtimeClassName }}
{{- end }}

{{/* Whether an agent that is not privileged needs rights for MIG. */}}
{{- define "tandem.migAccess" -}}
{{- and (eq (include "tandem.access" .) "runtimeClass") .Values.migAccess }}
{{- end }}

{{/* The path where the agent finds the host's root. A simulated machine has the same path in the container as on the host. */}}
{{- define "tandem.hostRoot" -}}
{{- ternary "/" "/host" (ne .Values.simulated.profile "") }}
{{- end }}

{{- define "tandem.securityContext" -}}
{{- if eq (include "tandem.access" .) "privileged" -}}
privileged: true
{{- else -}}
privileged: false
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
  {{- if eq (include "tandem.migAccess" .) "true" }}
  # The driver's condition for MIG's placements, GPU instances and changes.
  add: [SYS_ADMIN]
  {{- end }}
{{- end }}
readOnlyRootFilesystem: true
{{- with .Values.seLinuxOptions }}
seLinuxOptions:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "tandem.mps.serviceAccountName" -}}
{{- if .Values.mps.serviceAccount.create }}
{{- default (printf "%s-mps-daemon" (include "tandem.fullname" .)) .Values.mps.serviceAccount.name }}
{{- else }}
{{- required "mps.serviceAccount.name is not set: name the existing service account, or leave mps.serviceAccount.create on" .Values.mps.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* The chart's settings for the pods of MPS daemons. pkg/controller/daemonpod.go adds the rest. */}}
{{- define "tandem.mps.pod" -}}
{{- $access := include "tandem.access" . -}}
metadata:
  labels:
    {{- include "tandem.instanceLabels" . | nindent 4 }}
    app.kubernetes.io/component: mps-daemon
    {{- include "tandem.releaseLabels" . | nindent 4 }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .Values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "tandem.mps.serviceAccountName" . }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with include "tandem.runtimeClassName" . }}
  runtimeClassName: {{ . }}
  {{- end }}
  securityContext:
    runAsUser: 0
    runAsGroup: 0
    seccompProfile:
      type: RuntimeDefault
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: mps-daemon
      image: {{ include "tandem.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      env:
        {{- if eq $access "runtimeClass" }}
        - name: NVIDIA_VISIBLE_DEVICES
          value: all
        - name: NVIDIA_DRIVER_CAPABILITIES
          value: compute,utility
        {{- else }}
        - name: NVIDIA_VISIBLE_DEVICES
          value: void
        {{- end }}
      {{- with .Values.mps.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- if eq $access "privileged" }}
        privileged: true
        {{- else }}
        privileged: false
        allowPrivilegeEscalation: false
        capabilities:
          drop: [ALL]
          # The daemon's program runs with chroot in the driver's root.
          add: [SYS_CHROOT]
        {{- end }}
        readOnlyRootFilesystem: true
        {{- with .Values.seLinuxOptions }}
        seLinuxOptions:
          {{- toYaml . | nindent 10 }}
        {{- end }}
{{- end }}

{{/* The host paths whose programs an MPS daemon may run: where this chart's agents find a driver (internal/driverroot). */}}
{{- define "tandem.mps.driverRoots" -}}
{{- if .Values.simulated.profile }}
- {{ .Values.simulated.root }}/driver
{{- else if eq .Values.driverRoot "auto" }}
- /run/nvidia/driver
- /home/kubernetes/bin/nvidia
- /opt/nvidia
- /x86_64-bottlerocket-linux-gnu/sys-root
- /aarch64-bottlerocket-linux-gnu/sys-root
- /
{{- else }}
- {{ .Values.driverRoot }}
{{- end }}
{{- end }}

{{/* CEL: the map has exactly the keys and values of is. Compared by key, because a CEL map literal cannot mix types of values. */}}
{{- define "tandem.celIs" -}}
{{- $it := .it -}}
{{ $it }}.size() == {{ len .is }}
{{- range $key, $value := .is }} && {{ $it }}[?{{ $key | squote }}] == optional.of({{ toJson $value }})
{{- end }}
{{- end }}

{{/* CEL: the list of resources has only the keys of most, each with at most that quantity. */}}
{{- define "tandem.celAtMost" -}}
{{- $most := dict -}}
{{- range $key, $value := .most -}}
{{- $_ := set $most $key (toString $value) -}}
{{- end -}}
{{ .it }}.orValue({}).all(k, k in {{ toJson $most }} && quantity(string({{ .it }}.orValue({})[k])).compareTo(quantity({{ toJson $most }}[k])) <= 0)
{{- end }}

{{/* GOMEMLIMIT of a container: 90 % of its memory limit. Near it Go collects garbage instead of growing. None without a limit,
and none if extraEnv has one: server-side apply refuses two variables of one name. */}}
{{- define "tandem.goMemoryLimit" -}}
{{- $limit := dig "limits" "memory" "" (default dict .resources) -}}
{{- range .extraEnv -}}
{{- if eq .name "GOMEMLIMIT" -}}
{{- $limit = "" -}}
{{- end -}}
{{- end -}}
{{- $text := toString $limit -}}
{{- if kindIs "float64" $limit -}}
{{- $text = printf "%.0f" $limit -}}
{{- end -}}
{{- $number := regexFind "^[0-9]+([.][0-9]+)?" $text -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 -}}
{{- $unit := trimPrefix $number $text -}}
{{- if and $number (hasKey $units $unit) -}}
- name: GOMEMLIMIT
  value: {{ mulf (float64 $number) (get $units $unit) 0.9 | floor | int64 | quote }}
{{- end }}
{{- end }}
