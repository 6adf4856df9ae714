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

{{- define "tandem.controller.serviceAccountName" -}}
{{- if .Values.controller.serviceAccount.create }}
{{- default (include "tandem.controller.name" .) .Values.controller.serviceAccount.name }}
{{- else }}
{{- required "controller.serviceAccount.name is not set: name the existing service account, or leave controller.serviceAccount.create on" .Values.controller.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* What agent and controller have in common. */}}
{{- define "tandem.instanceLabels" -}}
app.kubernetes.io/name: {{ include "tandem.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
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
{{- if not .Values.image.repository }}
{{- fail "image.repository is not set: Tandem has no public image yet. Build and push one with `make image-push IMAGE=registry.example.com/gpu/tandem:TAG`, then install with --set image.repository=registry.example.com/gpu/tandem --set image.tag=TAG" }}
{{- end }}
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

{{/* The path where the agent finds the host's root. A simulated machine lies at the same path inside as outside. */}}
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
{{- end }}
readOnlyRootFilesystem: true
{{- with .Values.seLinuxOptions }}
seLinuxOptions:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
