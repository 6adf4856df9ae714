// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"fmt"
	"path"
	"reflect"
	"slices"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// variablesPath is the key of NVIDIA's charts with environment variables of the agent.
const variablesPath = "kubeletPlugin.containers.gpus.env"

// argumentsPath stands for arguments of GPU Operator's programs. NVIDIA's charts have no such key.
const argumentsPath = "args"

// moreVariables are the keys that variables of NVIDIA's programs set, apart from those in nvidia-keys.yaml.
var moreVariables = map[string]string{
	"MIG_STRATEGY": "migStrategy", "NVIDIA_DRIVER_ROOT": "nvidiaDriverRoot", "NVIDIA_DEV_ROOT": "nvidiaDevRoot", "NVIDIA_CDI_HOOK_PATH": "nvidiaCDIHookPath",
	"LOG_VERBOSITY": "logVerbosity", "FAIL_ON_INIT_ERROR": "failOnInitError", "GFD_FAIL_ON_INIT_ERROR": "failOnInitError", "MPS_ROOT": "mps.root",
	"FEATURE_GATES": "featureGates", "NO_TIMESTAMP": "gfd.noTimestamp", "SLEEP_INTERVAL": "gfd.sleepInterval", "USE_NODE_FEATURE_API": "nfd.enableNodeFeatureApi",
	"KUBELET_PLUGINS_DIRECTORY_PATH": "kubeletPlugin.kubeletPluginsDirectoryPath", "CONSUMABLE_SHARES": "consumableShares",
}

// reportedVariables are not converted. They are reported as lost, with the reason why, unless their value is in silent.
var reportedVariables = map[string]struct {
	silent []string
	why    string
}{
	"NVIDIA_VISIBLE_DEVICES": {[]string{"", "all", "void", "none"}, "it hides GPUs from NVIDIA's software, but not from Tandem's agents. " +
		"For each GPU that it does not list, add a rule with use: none to the configuration (tandem.devices[].use)"},
	"CONFIG_FILE": {[]string{""}, "pass the file, or the ConfigMap that has it, with -f"},
	"CDI_ROOT":    {[]string{"", "/var/run/cdi"}, "cdiDir of Tandem's chart sets this directory"},
}

// ownVariables concern NVIDIA's containers themselves: what NVIDIA's container runtime gives them, and where they find what.
var ownVariables = []string{
	"NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_MIG_MONITOR_DEVICES", "NVIDIA_MIG_CONFIG_DEVICES", "NODE_NAME", "NAMESPACE", "POD_NAMESPACE", "POD_NAME",
	"POD_UID", "SERVICE_ACCOUNT_NAME", "IMAGE_NAME", "IMAGE_PULL_SECRETS", "IMAGE_PULL_POLICY", "CDI_ENABLED", "HTTP_ENDPOINT", "METRICS_PATH",
	"HEALTHCHECK_PORT", "KUBELET_REGISTRAR_DIRECTORY_PATH", "MASK_NVIDIA_DRIVER_PARAMS", "HOST_ROOT", "CONFIG_FILE_SRCDIR",
}

// applyVariables sets the keys that variables set: in NVIDIA's programs a variable overrides the key. left are the variables that set no key,
// without those that are lost.
func (t table) applyVariables(values, chosen map[string]any, variables []any) (left []any, lost []lostKeys, changes []string) {
	for _, one := range variables {
		name, _ := at(one, "name").(string)
		text, isText := at(one, "value").(string)
		key, known := t.variables[name]
		value, ok := valueOf(key, text)
		reported, isReported := reportedVariables[name]
		switch {
		case slices.Contains(ownVariables, name):
		case isReported && (at(one, "valueFrom") != nil || !slices.Contains(reported.silent, text)):
			lost = append(lost, lostKeys{path: name, why: reported.why})
		case isReported:
		case !isText || !known || !ok:
			left = append(left, one)
		default:
			if is := at(values, key); !isUnset(is) && !reflect.DeepEqual(plain(is), plain(value)) {
				changes = append(changes, fmt.Sprintf("%s: the environment variable %s overrides it, as it does in NVIDIA's program", key, name))
			}
			put(values, key, value)
			if chosen != nil {
				put(chosen, key, value)
			}
		}
	}
	return left, lost, changes
}

// addVariables adds the variables of another program to a list, without those that the list has. differ are the names of those that had another
// value there and that concern Tandem.
func addVariables(list, more []any) (all []any, differ []string) {
	all = slices.Clone(list)
	for _, one := range more {
		name, _ := at(one, "name").(string)
		same := slices.IndexFunc(list, func(other any) bool { return at(other, "name") == name })
		switch {
		case same < 0:
			all = append(all, one)
		case !reflect.DeepEqual(list[same], one) && !slices.Contains(ownVariables, name):
			differ = append(differ, name)
		}
	}
	return all, differ
}

// valueOf returns a variable's text as the key has it.
func valueOf(key, text string) (value any, ok bool) {
	if isBoolean(key) {
		set, err := strconv.ParseBool(text)
		return set, err == nil
	}
	if several := listOf(text); key == "deviceListStrategy" && len(several) > 1 {
		return several, true
	}
	return text, true
}

// listOf returns the words of a variable that is a list.
func listOf(text string) (words []any) {
	for one := range strings.SplitSeq(text, ",") {
		words = append(words, strings.TrimSpace(one))
	}
	return words
}

func isBoolean(key string) bool {
	return slices.Contains([]string{
		"compatWithCPUManager", "gdrcopyEnabled", "gdsEnabled", "mofedEnabled", "failOnInitError", "gfd.noTimestamp", "nfd.enableNodeFeatureApi",
	}, key)
}

// isList reports whether a key is a list: NVIDIA's programs add up its flags if there are several. Of another key's flags the last one counts.
func isList(key string) bool { return key == "deviceListStrategy" || key == "cdi.featureFlags" }

// argumentsAsVariables returns flags of NVIDIA's programs as variables, and the words that are none. A flag takes its value from the next
// word, unless it has one or is boolean.
func (t table) argumentsAsVariables(words []string) (variables []any, others []string) {
	lists := map[string]map[string]any{}
	for i := 0; i < len(words); i++ {
		flag, value, has := strings.Cut(words[i], "=")
		name := strings.ReplaceAll(strings.ToUpper(strings.TrimLeft(flag, "-")), "-", "_")
		key, known := t.variables[name]
		switch last := i+1 == len(words); {
		case !known || !strings.HasPrefix(flag, "-") || !has && last && !isBoolean(key):
			others = append(others, words[i])
			continue
		case !has && isBoolean(key):
			value = "true"
		case !has:
			i++
			value = words[i]
		}
		one := map[string]any{"name": name, "value": value}
		if before, ok := lists[key]; ok {
			before["value"] = fmt.Sprintf("%s,%s", before["value"], value)
			continue
		}
		if isList(key) {
			lists[key] = one
		}
		variables = append(variables, one)
	}
	return variables, others
}

// daemonSetSource reads the settings that a DaemonSet of NVIDIA's has in its environment and arguments. Where neither a controller nor one of
// the releases wrote it, it also says on which nodes it runs.
func daemonSetSource(name string, set *appsv1.DaemonSet, releases []Source) (Source, error) {
	t, err := theTable()
	if err != nil {
		return Source{}, err
	}
	role, ok := roleOf(*set)
	if !ok || role == mpsDaemon {
		return Source{}, fmt.Errorf("DaemonSet %s runs neither NVIDIA's device plugin nor its DRA driver", set.Name)
	}
	s := Source{Name: name, Kind: DevicePlugin, Values: map[string]any{}}
	if role == draDriver {
		s.Kind = DRADriver
	}
	pod := &set.Spec.Template.Spec
	var container corev1.Container
	for _, c := range pod.Containers {
		if slices.Contains([]string{"gpus", "nvidia-device-plugin-ctr", "nvidia-device-plugin"}, c.Name) {
			container = c
		}
	}
	variables, _ := plain(container.Env).([]any)
	words := slices.Concat(container.Command, container.Args)
	// Before the flags is the program. A script is no flag: that of the chart of NVIDIA's DRA driver has no settings of its own.
	if script := slices.IndexFunc(words, func(word string) bool { return strings.Contains(word, "gpu-kubelet-plugin") }); role == draDriver && script >= 0 {
		words = words[script:]
	}
	for len(words) > 0 && !strings.HasPrefix(words[0], "-") {
		words = words[1:]
	}
	flags, others := t.argumentsAsVariables(words)
	variables = append(variables, flags...)
	if controller := metav1.GetControllerOf(set); controller != nil && controller.Kind == "ClusterPolicy" {
		s.Kind = Operator
	}
	release := s.releaseOf(set, releases)
	s.partial = s.Kind == Operator || release != nil
	if settings := mountedConfigs(pod); role == devicePlugin && (settings != nil || release.hasConfigs()) {
		variables = slices.DeleteFunc(variables, func(one any) bool { return at(one, "name") == "CONFIG_FILE" })
		if settings != nil {
			s.Values["config"] = settings
		}
	}
	switch {
	case s.Kind == Operator:
		variables = slices.DeleteFunc(variables, func(one any) bool {
			byCDI := at(one, "name") == "DEVICE_LIST_STRATEGY" && at(one, "value") == operatorsCDI
			s.cdi = s.cdi || byCDI
			usually := slices.ContainsFunc(t.charts[Operator].Keys["devicePlugin.env"], func(usual any) bool {
				list, _ := usual.([]any)
				return slices.ContainsFunc(list, func(item any) bool { return reflect.DeepEqual(item, one) })
			})
			return byCDI || usually || at(one, "name") == "NVIDIA_CDI_HOOK_PATH"
		})
		// The Operator's own script is among the arguments, unless a user set them.
		others = slices.DeleteFunc(others, func(word string) bool { return word == "-c" || word == "/bin/entrypoint.sh" })
		s.loseArguments("devicePlugin.args", others)
	case release == nil:
		s.place(set)
		s.loseArguments("args", others)
		if len(container.EnvFrom) > 0 {
			s.lost = append(s.lost, lostKeys{path: "envFrom", why: "set its variables as keys of the chart, or in extraEnv"})
		}
	}
	if directory := kubeletDirectory(pod, role); directory != "" && directory != "/var/lib/kubelet" {
		put(s.Values, "kubeletPlugin.kubeletPluginsDirectoryPath", path.Join(directory, "plugins"))
	}
	if len(variables) > 0 {
		put(s.Values, variablesPath, variables)
	}
	return s, nil
}

// kubeletDirectory returns kubelet's directory on the host, by the one below it that a pod mounts for its sockets; "" if it mounts none.
func kubeletDirectory(pod *corev1.PodSpec, role role) string {
	below := "device-plugins"
	if role == draDriver {
		below = "plugins_registry"
	}
	for _, v := range pod.Volumes {
		if v.HostPath != nil && path.Base(v.HostPath.Path) == below {
			return path.Dir(path.Clean(v.HostPath.Path))
		}
	}
	return ""
}

func (s *Source) loseArguments(path string, words []string) {
	if len(words) > 0 {
		s.lost = append(s.lost, lostKeys{path: path, keys: words, why: "set these flags in the configuration or in extraArgs"})
	}
}

// operatorsCDI is the strategy that GPU Operator sets with cdi.enabled.
const operatorsCDI = "cdi-annotations,cdi-cri"

// Annotations of an object name the Helm release that it is of.
const (
	releaseAnnotation          = "meta.helm.sh/release-name"
	releaseNamespaceAnnotation = "meta.helm.sh/release-namespace"
)

// releaseOf returns the release that wrote a DaemonSet; nil if it was not read.
func (s *Source) releaseOf(set *appsv1.DaemonSet, releases []Source) *Source {
	of := set.Annotations[releaseNamespaceAnnotation] + "/" + set.Annotations[releaseAnnotation]
	for i, r := range releases {
		// GPU Operator writes its DaemonSets itself.
		if r.release != "" && r.Kind == s.Kind && (r.release == of || r.Kind == Operator) {
			return &releases[i]
		}
	}
	return nil
}

// place sets the keys that say on which nodes a DaemonSet runs, and with which runtime.
func (s *Source) place(set *appsv1.DaemonSet) {
	above := ""
	if s.Kind == DRADriver {
		above = "kubeletPlugin."
	}
	pod := set.Spec.Template.Spec
	for key, value := range map[string]any{
		"nodeSelector": pod.NodeSelector, "affinity": pod.Affinity, "tolerations": pod.Tolerations, "priorityClassName": pod.PriorityClassName,
	} {
		if value = plain(value); !isEmpty(value) {
			put(s.Values, above+key, value)
		}
	}
	if name := pod.RuntimeClassName; name != nil && s.Kind == DevicePlugin {
		s.Values["runtimeClassName"] = *name
	}
}
