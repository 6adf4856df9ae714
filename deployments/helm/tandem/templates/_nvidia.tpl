{{/*
Keys of NVIDIA's charts (nvidia-device-plugin 0.19.3, dra-driver-nvidia-gpu) that work here under their own names.
"tandem.nvidia" moves them to this chart's keys. A template that uses one of these keys includes it first. It may run several times.
*/}}
{{- define "tandem.nvidia" -}}
{{- $v := .Values -}}
{{- $plugin := default dict $v.kubeletPlugin -}}
{{- $gpus := dig "containers" "gpus" dict $plugin -}}
{{- $hook := dig "nvidiaHookPath" "" (default dict $v.cdi) -}}
{{- $selector := dict -}}
{{- if $plugin.nodeSelector -}}
{{- $selector = merge (deepCopy $plugin.nodeSelector) (dict "kubernetes.io/os" "linux") -}}
{{- end -}}
{{- if not $v.simulated.profile -}}
{{- include "tandem.alias" (list $v "driverRoot" "auto" "nvidiaDriverRoot" $v.nvidiaDriverRoot) -}}
{{- include "tandem.alias" (list $v "devRoot" "auto" "nvidiaDevRoot" $v.nvidiaDevRoot) -}}
{{- end -}}
{{- include "tandem.alias" (list $v "cdiHook" "install" "cdi.nvidiaHookPath" $hook) -}}
{{- include "tandem.alias" (list $v "cdiHook" "install" "nvidiaCDIHookPath" $v.nvidiaCDIHookPath) -}}
{{- include "tandem.alias" (list $v "priorityClassName" "system-node-critical" "kubeletPlugin.priorityClassName" $plugin.priorityClassName) -}}
{{- include "tandem.alias" (list $v "nodeSelector" (dict "kubernetes.io/os" "linux") "kubeletPlugin.nodeSelector" $selector) -}}
{{- include "tandem.alias" (list $v "affinity" dict "kubeletPlugin.affinity" $plugin.affinity) -}}
{{- include "tandem.alias" (list $v "tolerations" (list (dict "operator" "Exists")) "kubeletPlugin.tolerations" $plugin.tolerations) -}}
{{- include "tandem.alias" (list $v "podAnnotations" dict "kubeletPlugin.podAnnotations" $plugin.podAnnotations) -}}
{{- include "tandem.alias" (list $v "extraEnv" list "kubeletPlugin.containers.gpus.env" $gpus.env) -}}
{{- if not $v.updateStrategy -}}
{{- $_ := set $v "updateStrategy" dict -}}
{{- end -}}
{{- if not $v.resources -}}
{{- $_ := set $v "resources" dict -}}
{{- end -}}
{{- $most := dig "rollingUpdate" "maxUnavailable" "" $v.updateStrategy -}}
{{- include "tandem.alias" (list $v.updateStrategy "updateStrategy.maxUnavailable" "10%" "updateStrategy.rollingUpdate.maxUnavailable" $most) -}}
{{- $most = dig "updateStrategy" "rollingUpdate" "maxUnavailable" "" $plugin -}}
{{- include "tandem.alias" (list $v.updateStrategy "updateStrategy.maxUnavailable" "10%" "kubeletPlugin.updateStrategy.rollingUpdate.maxUnavailable" $most) -}}
{{- $asked := default dict $gpus.resources -}}
{{- include "tandem.alias" (list $v.resources "resources.requests" (dict "cpu" "10m" "memory" "64Mi") "kubeletPlugin.containers.gpus.resources.requests" $asked.requests) -}}
{{- include "tandem.alias" (list $v.resources "resources.limits" (dict "memory" "256Mi") "kubeletPlugin.containers.gpus.resources.limits" $asked.limits) -}}
{{- with $plugin.kubeletPluginsDirectoryPath -}}
{{- if ne (base .) "plugins" -}}
{{- fail (printf "kubeletPlugin.kubeletPluginsDirectoryPath is %s, which does not end in /plugins, so kubeletDir cannot be derived from it. Set kubeletDir to kubelet's root directory instead" .) -}}
{{- end -}}
{{- include "tandem.alias" (list $v "kubeletDir" "/var/lib/kubelet" "kubeletPlugin.kubeletPluginsDirectoryPath" (dir .)) -}}
{{- end -}}
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
{{- range list
  (list "PASS_DEVICE_SPECS" $v.compatWithCPUManager) (list "FAIL_ON_INIT_ERROR" $v.failOnInitError)
  (list "DEVICE_LIST_STRATEGY" $v.deviceListStrategy) (list "DEVICE_ID_STRATEGY" $v.deviceIDStrategy)
  (list "GDRCOPY_ENABLED" $v.gdrcopyEnabled) (list "GDS_ENABLED" $v.gdsEnabled) (list "MOFED_ENABLED" $v.mofedEnabled)
  (list "DEVICE_DISCOVERY_STRATEGY" $v.deviceDiscoveryStrategy) (list "CDI_FEATURE_FLAGS" (dig "featureFlags" nil (default dict $v.cdi)))
  (list "GFD_NO_TIMESTAMP" (dig "noTimestamp" nil (default dict $v.gfd))) (list "GFD_SLEEP_INTERVAL" (dig "sleepInterval" nil (default dict $v.gfd)))
  (list "MODE" (include "tandem.nvidia.mode" $)) }}
{{- $value := index . 1 -}}
{{- if kindIs "slice" $value -}}
{{- $value = join "," $value -}}
{{- end -}}
{{- if not (or (kindIs "invalid" $value) (eq (toString $value) "") (has (index . 0) $others)) }}
- name: {{ index . 0 }}
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
{{- $webhook := omit $v.webhook "enabled" "port" -}}
{{- $controller := pick $v.controller "leaderElection" "metrics" "podAnnotations" "podSecurityContext" "containers" "networkPolicy" -}}
{{- $plugin := pick (default dict $v.kubeletPlugin) "metrics" "podSecurityContext" "networkPolicy" "kubeletRegistrarDirectoryPath" -}}
{{- range $name, $container := dig "containers" dict (default dict $v.kubeletPlugin) -}}
{{- range $key := keys $container | sortAlpha -}}
{{- if not (and (eq $name "gpus") (has $key (list "env" "resources"))) -}}
{{- $_ := set $plugin (printf "containers.%s.%s" $name $key) true -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range list
  (list "gfd" (omit (default dict $v.gfd) "enabled" "noTimestamp" "sleepInterval") "the agent writes the labels, so there is no DaemonSet for them")
  (list "failOnInitError" $v.failOnInitError "the agent waits for the driver") (list "allowDefaultNamespace" $v.allowDefaultNamespace "every namespace is allowed")
  (list "gpuResourcesEnabledOverride" $v.gpuResourcesEnabledOverride "Tandem serves claims for GPUs even if NVIDIA's driver serves ComputeDomains")
  (list "selectorLabelsOverride" $v.selectorLabelsOverride "") (list "podSecurityContext" $v.podSecurityContext "the value access determines it")
  (list "securityContext" $v.securityContext "the value access determines it") (list "nfd" $v.nfd "this chart does not install Node Feature Discovery")
  (list "mps.root" $v.mps.root "MPS daemons keep their files below runDir") (list "mps.enableHostPID" $v.mps.enableHostPID "MPS daemons always use the host's PID namespace")
  (list "mps.enableHostNetwork" $v.mps.enableHostNetwork "MPS daemons need no network") (list "devicePlugin.enableHostNetwork" (dig "enableHostNetwork" nil (default dict $v.devicePlugin)) "the agent needs no host network")
  (list "resources.computeDomains" (dig "computeDomains" nil (default dict $v.resources)) "Tandem has no ComputeDomains; NVIDIA's driver can serve them beside it")
  (list "resourceApiVersion" $v.resourceApiVersion "it is resource.k8s.io/v1") (list "featureGates" $v.featureGates "the configuration turns features on for each GPU") (list "altProcDevices" $v.altProcDevices "only ComputeDomains use it")
  (list "webhook" $webhook "the controller serves the webhook and makes its certificates") (list "controller" $controller "Tandem's controller always elects a leader, and serves metrics on metrics.port")
  (list "kubeletPlugin" $plugin "the agent serves metrics.port") }}
{{- if index . 1 }}
  {{ index . 0 }}{{ if kindIs "map" (index . 1) }} ({{ keys (index . 1) | sortAlpha | join ", " }}){{ end }}{{ with index . 2 }}: {{ . }}{{ end }}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Name of the ConfigMap. With several configurations it is another one: agents that are not updated yet still need the file with one. */}}
{{- define "tandem.configMap" -}}
{{- $own := ternary (printf "%s-configs" (include "tandem.fullname" .)) (include "tandem.fullname" .) (eq (include "tandem.config" .) "several") -}}
{{- .Values.config.name | default $own -}}
{{- end }}
