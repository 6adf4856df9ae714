{{/*
Keys of NVIDIA's charts (nvidia-device-plugin 0.19.3, dra-driver-nvidia-gpu) that work here under their own names.
files/nvidia-keys.yaml lists them. "tandem.nvidia" moves them to this chart's keys. A template that uses one of these keys includes it first. It may run several times.
*/}}
{{- define "tandem.nvidia" -}}
{{- $v := .Values -}}
{{- range (include "tandem.nvidia.keys" . | fromYaml).moved -}}
{{- $value := include "tandem.nvidia.at" (list $v .key) | fromJson | values | first -}}
{{- if and $value (not (and .real (dig "profile" "" (default dict $v.simulated)))) -}}
{{- with .add -}}
{{- $value = merge (deepCopy $value) . -}}
{{- end -}}
{{- if .parent -}}
{{- if ne (base $value) .parent -}}
{{- fail (printf "%s is %s, which does not end in /%s, so %s cannot be derived from it. Set %s to kubelet's root directory instead" .key $value .parent .to .to) -}}
{{- end -}}
{{- $value = dir $value -}}
{{- end -}}
{{- $map := $v -}}
{{- range splitList "." .to | initial -}}
{{- if not (get $map .) -}}
{{- $_ := set $map . dict -}}
{{- end -}}
{{- $map = get $map . -}}
{{- end -}}
{{- include "tandem.alias" (list $map .to .default .key $value) -}}
{{- end -}}
{{- end -}}
{{- range list "updateStrategy" "resources" -}}
{{- if not (get $v .) -}}
{{- $_ := set $v . dict -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "tandem.nvidia.keys" -}}
{{- .Files.Get "files/nvidia-keys.yaml" -}}
{{- end }}

{{/* The value at a path, as the only value of a JSON object. It is null if a key of the path is missing. */}}
{{- define "tandem.nvidia.at" -}}
{{- $value := index . 0 -}}
{{- range splitList "." (index . 1) -}}
{{- $value = kindIs "map" $value | ternary (get (kindIs "map" $value | ternary $value dict) .) nil -}}
{{- end -}}
{{- dict "value" $value | toJson -}}
{{- end }}

{{/* Sets the key at the end of a path, in its map, to the value that an alias of it has, unless that is empty. Both set to different values are an error. */}}
{{- define "tandem.alias" -}}
{{- $map := index . 0 -}}
{{- $path := index . 1 -}}
{{- $key := splitList "." $path | last -}}
{{- $unset := index . 2 -}}
{{- $alias := index . 3 -}}
{{- $value := index . 4 -}}
{{- $is := get $map $key -}}
{{- if $value -}}
{{- if not (has (toJson $is) (list "null" "\"\"" "{}" (toJson $unset) (toJson $value))) -}}
{{- fail (printf "%s and %s are two names of one setting, with the values %s and %s: remove one of them" $path $alias (toJson $is) (toJson $value)) -}}
{{- end -}}
{{- $_ := set $map $key $value -}}
{{- end -}}
{{- end }}

{{/* Settings of NVIDIA's charts that the agent reads from its environment, as NVIDIA's binaries do. They override the configuration. */}}
{{- define "tandem.nvidia.variables" -}}
{{- $v := .Values -}}
{{- $others := list -}}
{{- range $v.extraEnv -}}
{{- $others = append $others .name -}}
{{- end -}}
{{- $variables := append (include "tandem.nvidia.keys" . | fromYaml).variables (dict "name" "MODE") -}}
{{- range $variables }}
{{- $value := include "tandem.nvidia.mode" $ -}}
{{- with .key -}}
{{- $value = include "tandem.nvidia.at" (list $v .) | fromJson | values | first -}}
{{- end -}}
{{- if kindIs "slice" $value -}}
{{- $value = join "," $value -}}
{{- end -}}
{{- if not (or (kindIs "invalid" $value) (eq (toString $value) "") (has .name $others)) }}
- name: {{ .name }}
  value: {{ toString $value | quote }}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The mode that leaves out an API which NVIDIA's keys turn off. */}}
{{- define "tandem.nvidia.mode" -}}
{{- $limits := dig "enabled" true (default dict .Values.devicePlugin) -}}
{{- $claims := dig "gpus" "enabled" true (default dict .Values.resources) -}}
{{- if not (or $limits $claims) -}}
{{- fail "devicePlugin.enabled and resources.gpus.enabled are both false, so no GPU would be served: set one of them to true" -}}
{{- end -}}
{{- $mode := ternary "" (ternary "ClaimsOnly" "DevicePluginOnly" $claims) (and $limits $claims) -}}
{{- $config := default dict .Values.config -}}
{{- $all := dict "config" $config -}}
{{- range $name, $text := $config.map -}}
{{- $_ := set $all (printf "config.map.%s" $name) (kindIs "string" $text | ternary (fromYaml (toString $text)) $text) -}}
{{- end -}}
{{- range $at, $one := $all -}}
{{- $section := get (default dict $one) "tandem" -}}
{{- $configured := kindIs "map" $section | ternary (get (kindIs "map" $section | ternary $section dict) "mode") "" -}}
{{- if and $mode $configured (ne $mode (toString $configured)) -}}
{{- fail (printf "%s.tandem.mode is %s, but %s: false means mode %s. Remove one of the two" $at $configured (ternary "devicePlugin.enabled" "resources.gpus.enabled" $claims) $mode) -}}
{{- end -}}
{{- end -}}
{{- $mode -}}
{{- end }}

{{/* What config is: "one" node configuration, "several" in a ConfigMap (NVIDIA's keys name, map, default and fallbackStrategies), or "". */}}
{{- define "tandem.config" -}}
{{- $config := default dict .Values.config -}}
{{- $one := omit $config "name" "map" "default" "fallbackStrategies" -}}
{{- $several := or $config.name $config.map -}}
{{- if and $config.name $config.map -}}
{{- fail "config.name and config.map are both set: name selects a ConfigMap that exists, and map makes one. Remove one of them" -}}
{{- end -}}
{{- if and $one $several -}}
{{- fail (printf "config has keys of a node configuration (%s) beside name or map. Move them into an entry of config.map, or into the ConfigMap that config.name names" (keys $one | sortAlpha | join ", ")) -}}
{{- end -}}
{{- if and $config.default (not $several) -}}
{{- fail (printf "config.default is %s, which has no effect without config.name or config.map: name the ConfigMap with that configuration, or remove config.default" $config.default) -}}
{{- end -}}
{{- if and (not $several) $config.fallbackStrategies (ne (toJson $config.fallbackStrategies) (toJson (list "named" "single"))) -}}
{{- fail "config.fallbackStrategies has no effect without config.name or config.map: set one of these, or remove it" -}}
{{- end -}}
{{- if and $config.default $config.map (not (hasKey $config.map $config.default)) -}}
{{- fail (printf "config.default is %s, which config.map does not have (only %s)" $config.default (keys $config.map | sortAlpha | join ", ")) -}}
{{- end -}}
{{- if $config.map -}}
{{- $strategies := $config.fallbackStrategies -}}
{{- $selects := or $config.default (has "empty" $strategies) (and (has "named" $strategies) (hasKey $config.map "default")) (and (has "single" $strategies) (eq (len $config.map) 1)) -}}
{{- if not $selects -}}
{{- fail (printf "no configuration of config.map is used by a node without the label nvidia.com/device-plugin.config: set config.default, or call one configuration \"default\" (fallbackStrategies are %s)" (join ", " $strategies)) -}}
{{- end -}}
{{- end -}}
{{- if $several -}}several{{- else if $one -}}one{{- end -}}
{{- end }}

{{/* The keys of NVIDIA's charts that are set and change nothing here, one a line. */}}
{{- define "tandem.nvidia.unused" -}}
{{- $v := .Values -}}
{{- range (include "tandem.nvidia.keys" . | fromYaml).unused }}
{{- $value := include "tandem.nvidia.at" (list $v .key) | fromJson | values | first -}}
{{- if .keys -}}
{{- $all := default dict $value -}}
{{- $value = dict -}}
{{- range .keys -}}
{{- if hasKey $all . -}}
{{- $_ := set $value . (get $all .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $value }}
  {{ .key }}{{ if kindIs "map" $value }} ({{ keys $value | sortAlpha | join ", " }}){{ end }}: {{ .why }}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Name of the ConfigMap. With several configurations it is another one: agents that are not updated yet still need the file with one. */}}
{{- define "tandem.configMap" -}}
{{- $own := ternary (printf "%s-configs" (include "tandem.fullname" .)) (include "tandem.fullname" .) (eq (include "tandem.config" .) "several") -}}
{{- .Values.config.name | default $own -}}
{{- end }}

{{/*
The keys without a value that the templates, the agent or the controller cannot do without, as a JSON list. A section is before its keys. The schema does
not see such a key, and must not require it: --reuse-values leaves out the keys that are new.
*/}}
{{- define "tandem.missing" -}}
{{- $v := .Values -}}
{{- $absent := list -}}
{{- $missing := list -}}
{{- range list
  "admissionPolicy" "admissionPolicy.create" "cdiDeviceNames" "cdiDir" "cdiHook" "cgroupRoot" "claimParameters" "controller"
  "controller.podDisruptionBudget" "controller.serviceAccount" "controller.serviceAccount.create" "crds" "crds.create" "criticalPodsQuota"
  "devRoot" "deviceClasses" "deviceClasses.countInQuota" "driverName" "driverRoot" "flowControl" "image" "kubeletDir" "logVerbosity"
  "metrics" "metrics.podMonitor" "metrics.port" "metrics.service" "metrics.service.create" "metrics.serviceMonitor" "mps"
  "mps.serviceAccount" "mps.serviceAccount.create" "networkPolicy" "nvml" "podPolicy" "podPolicy.action" "rbac" "rbac.create"
  "resourceName" "runDir" "serviceAccount" "serviceAccount.create" "simulated" "simulated.profile" "simulated.root" "webhook"
  "webhook.port" -}}
{{- $at := $v -}}
{{- range splitList "." . -}}
{{- $at = kindIs "map" $at | ternary (index (kindIs "map" $at | ternary $at dict) .) nil -}}
{{- end -}}
{{- if kindIs "invalid" $at -}}
{{- if not (has (splitList "." . | initial | join ".") $absent) -}}
{{- $missing = append $missing . -}}
{{- end -}}
{{- $absent = append $absent . -}}
{{- end -}}
{{- end -}}
{{- toJson $missing -}}
{{- end }}
