// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/client-go/kubernetes"
	kjson "sigs.k8s.io/json"
)

// releaseType is the type of the Secrets in which Helm 3 keeps releases (helm, pkg/storage/driver/secrets.go).
const releaseType = "helm.sh/release.v1"

// largestRelease bounds what a Secret, of at most 1 MiB, may decompress to.
const largestRelease = 64 << 20

// chartKinds are the names of NVIDIA's charts.
var chartKinds = map[string]Kind{
	"nvidia-device-plugin": DevicePlugin, "dra-driver-nvidia-gpu": DRADriver, "nvidia-dra-driver-gpu": DRADriver, "gpu-operator": Operator,
}

// ReadReleases returns the values of the Helm releases of NVIDIA's charts in all namespaces, each by its newest revision, with the ConfigMaps that
// they name.
// It returns what it could read together with errors about the rest. namespace is that of Tandem's release; if it is empty, releases are found.
func ReadReleases(ctx context.Context, client kubernetes.Interface, namespace string) ([]Source, error) {
	list, err := client.CoreV1().Secrets(metav1.NamespaceAll).List(ctx, metav1.ListOptions{
		LabelSelector: "owner=helm", FieldSelector: "type=" + releaseType,
	})
	if err != nil {
		return nil, fmt.Errorf("list Secrets of Helm releases: %w", err)
	}
	trusted := trustedNamespaces(ctx, client, namespace)
	var sources []Source
	var errs []error
	for _, secret := range newestRevisions(list.Items) {
		ofRelease, err := releaseSources(secret)
		if err != nil {
			errs = append(errs, fmt.Errorf("read Secret %s/%s: %w", secret.Namespace, secret.Name, err))
		}
		if len(ofRelease) == 0 {
			continue
		}
		if ok, err := trusted(secret.Namespace); err != nil {
			errs = append(errs, fmt.Errorf("%s is not read: %w", ofRelease[0].Name, err))
			continue
		} else if !ok {
			errs = append(errs, fmt.Errorf("%s is not read: no pod of its namespace mounts kubelet's directories for plugins, "+
				"so a tenant may have created it. If it is NVIDIA's, and has no pods because no node with a GPU runs, write its values to a file "+
				"with helm get values --all, and use that with -f", ofRelease[0].Name))
			continue
		}
		for _, source := range ofRelease {
			sources = append(sources, source)
			name, _ := at(source.Values, "config.name").(string)
			if name == "" {
				continue
			}
			configMap, err := readConfigMap(ctx, client, secret.Namespace, name)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			configMap.release = source.release
			sources = append(sources, configMap)
		}
	}
	return sources, errors.Join(errs...)
}

// readConfigMap returns the node configurations in a ConfigMap.
func readConfigMap(ctx context.Context, client kubernetes.Interface, namespace, name string) (Source, error) {
	configMap, err := client.CoreV1().ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return Source{}, fmt.Errorf("get ConfigMap %s/%s: %w", namespace, name, err)
	}
	data := map[string]any{}
	for name, text := range configMap.Data {
		data[name] = text
	}
	return Source{
		Name: fmt.Sprintf("ConfigMap %s/%s", namespace, name), Kind: Configuration, configMap: name,
		Values: map[string]any{"config": map[string]any{"map": data}},
	}, nil
}

// newestRevisions returns the last Secret of each release, in the order of their names. Helm leaves what it has made when an installation, an
// upgrade or an uninstallation fails (helm, pkg/release/common/status.go), so only those that were uninstalled are left out.
func newestRevisions(secrets []corev1.Secret) []corev1.Secret {
	revision := func(s corev1.Secret) int {
		n, _ := strconv.Atoi(s.Labels["version"])
		return n
	}
	newest := map[string]corev1.Secret{}
	for _, s := range secrets {
		of := s.Namespace + "/" + cmp.Or(s.Labels["name"], s.Name)
		if known, found := newest[of]; !found || revision(s) > revision(known) {
			newest[of] = s
		}
	}
	found := make([]corev1.Secret, 0, len(newest))
	for _, of := range slices.Sorted(maps.Keys(newest)) {
		if status := newest[of].Labels["status"]; status != "uninstalled" && status != "superseded" {
			found = append(found, newest[of])
		}
	}
	return found
}

// ReadDaemonSets returns the settings that NVIDIA's DaemonSets have in their environment and arguments, as those of GPU Operator and of static
// manifests do. It also returns the node configurations in the ConfigMaps that only a DaemonSet names. It returns what it could read together
// with errors about the rest. namespace is that of ReadReleases, and releases are its result.
func ReadDaemonSets(ctx context.Context, client kubernetes.Interface, namespace string, releases []Source) ([]Source, error) {
	sets, err := client.AppsV1().DaemonSets(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list DaemonSets: %w", err)
	}
	trusted := trustedNamespaces(ctx, client, namespace)
	read := map[string]bool{} // ConfigMaps
	var sources []Source
	var errs []error
	for i := range sets.Items {
		set := &sets.Items[i]
		if role, ok := roleOf(*set); !ok || role == mpsDaemon {
			continue
		}
		ok, err := trusted(set.Namespace)
		if err != nil || !ok {
			errs = append(errs, err) // the plan names one of a tenant
			continue
		}
		source, err := daemonSetSource("DaemonSet "+set.Namespace+"/"+set.Name, set, releases)
		if err != nil {
			errs = append(errs, err)
		}
		if len(source.Values) > 0 || len(source.lost) > 0 || source.cdi {
			sources = append(sources, source)
		}
		name, _ := at(source.Values, "config.name").(string)
		if name == "" || source.releaseOf(set, releases).hasConfigs() || read[set.Namespace+"/"+name] {
			continue
		}
		read[set.Namespace+"/"+name] = true
		configMap, err := readConfigMap(ctx, client, set.Namespace, name)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		sources = append(sources, configMap)
	}
	return sources, errors.Join(errs...)
}

// trustedNamespaces returns whether tenants cannot create releases in a namespace: it is administered, or NVIDIA's DaemonSets left nodes from there.
func trustedNamespaces(ctx context.Context, client kubernetes.Interface, tandem string) func(namespace string) (bool, error) {
	administered := administeredIn(ctx, client, tandem)
	allLeft := sync.OnceValues(func() ([]string, error) { return setsThatLeft(ctx, client) })
	return func(namespace string) (bool, error) {
		ok, err := administered(namespace)
		if ok {
			return true, nil
		}
		left, leftErr := allLeft()
		if slices.ContainsFunc(left, func(name string) bool { return strings.HasPrefix(name, namespace+"/") }) {
			return true, nil
		}
		return false, cmp.Or(err, leftErr)
	}
}

// helmRelease is the content of a Secret, as far as it is read (helm, pkg/release/v1 and pkg/chart/v2).
type helmRelease struct {
	Name  string `json:"name"`
	Chart struct {
		Metadata struct {
			Name         string       `json:"name"`
			Version      string       `json:"version"`
			Dependencies []dependency `json:"dependencies"`
		} `json:"metadata"`
		Values map[string]any `json:"values"`
	} `json:"chart"`
	Config map[string]any `json:"config"`
}

type dependency struct {
	Name    string `json:"name"`
	Version string `json:"version"`
}

// releaseSources decodes a Secret. It returns nothing if neither its chart nor a dependency of it is NVIDIA's.
func releaseSources(secret corev1.Secret) ([]Source, error) {
	release, err := decodeRelease(secret)
	if err != nil {
		return nil, err
	}
	name := fmt.Sprintf("release %s/%s%s", secret.Namespace, release.Name, revisionOf(secret))
	values, chart := overlay(release.Chart.Values, release.Config), release.Chart.Metadata
	if kind, ok := chartKinds[chart.Name]; ok {
		source := Source{Name: name, Kind: kind, Values: values, Chosen: release.Config}
		if source.Chosen == nil {
			source.Chosen = map[string]any{}
		}
		if source, err = ofChart(source, secret.Namespace+"/"+release.Name, chart.Version); err != nil {
			return nil, err
		}
		return []Source{source}, nil
	}
	// Helm leaves out disabled dependencies, and replaces the name of a dependency by its alias (ProcessDependencies). ReadDaemonSets reads those
	// with an alias. Helm adds the dependencies' defaults to the values, so it is not known which of them a user chose: Chosen stays nil.
	var sources []Source
	for _, d := range chart.Dependencies {
		kind, ok := chartKinds[d.Name]
		if !ok {
			continue
		}
		below, _ := values[d.Name].(map[string]any)
		below = overlay(below, map[string]any{"global": nil})
		source, err := ofChart(Source{Name: name + ", " + d.Name, Kind: kind, Values: below}, secret.Namespace+"/"+release.Name, d.Version)
		if err != nil {
			return nil, err
		}
		sources = append(sources, source)
	}
	return sources, nil
}

// ofChart completes the source of a release's values of a chart.
func ofChart(source Source, release, version string) (Source, error) {
	t, err := theTable()
	if source.Kind == Operator && err == nil {
		source, err = operatorSource(source.Name, source.Values, t.charts[Operator].Kept)
	}
	if err != nil {
		return Source{}, err
	}
	source.release = release
	if newest := t.charts[source.Kind].Newest; isNewer(version, newest) {
		source.changes = append(source.changes, fmt.Sprintf("%s: its chart has version %s. Defaults that are newer than version %s count as set by you",
			source.Name, version, newest))
	}
	return source, nil
}

func decodeRelease(secret corev1.Secret) (release helmRelease, err error) {
	compressed, err := base64.StdEncoding.DecodeString(string(secret.Data["release"]))
	if err != nil {
		return helmRelease{}, fmt.Errorf("decode release: %w", err)
	}
	reader, err := gzip.NewReader(bytes.NewReader(compressed))
	if err != nil {
		return helmRelease{}, fmt.Errorf("decompress release: %w", err)
	}
	text, err := io.ReadAll(io.LimitReader(reader, largestRelease+1))
	if err == nil && len(text) > largestRelease {
		err = fmt.Errorf("it is larger than %d bytes", largestRelease)
	}
	if err != nil {
		return helmRelease{}, fmt.Errorf("decompress release: %w", err)
	}
	if err := kjson.UnmarshalCaseSensitivePreserveInts(text, &release); err != nil {
		return helmRelease{}, fmt.Errorf("parse release: %w", err)
	}
	return release, nil
}

// revisionOf names the revision of a release whose last installation or upgrade has not succeeded: its values may not be those that run.
func revisionOf(secret corev1.Secret) string {
	if status := secret.Labels["status"]; status != "deployed" {
		return fmt.Sprintf(" (revision %s, %s)", secret.Labels["version"], status)
	}
	return ""
}

// isNewer compares versions of charts. Versions of the DRA driver were years before 0.4.
func isNewer(chart, newest string) bool {
	is, err := version.ParseGeneric(chart)
	known := version.MustParseGeneric(newest)
	return err == nil && known.LessThan(is) && (known.Major() > 0 || is.Major() != 25)
}

// overlay returns values with those that a user set, as Helm merges them: maps by key, and null removes a key.
func overlay(values, set map[string]any) map[string]any {
	merged := maps.Clone(values)
	if merged == nil {
		merged = map[string]any{}
	}
	for _, key := range slices.Sorted(maps.Keys(set)) {
		value := set[key]
		inside, isMap := value.(map[string]any)
		below, wasMap := merged[key].(map[string]any)
		switch {
		case value == nil:
			delete(merged, key)
		case isMap && wasMap:
			merged[key] = overlay(below, inside)
		default:
			merged[key] = value
		}
	}
	return merged
}
