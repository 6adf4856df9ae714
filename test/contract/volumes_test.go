// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"context"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// makeVolumes makes the pod's volumes and returns their paths on the node. ConfigMaps are followed until following ends. The token is not
// renewed: it lasts for an hour.
func (h *host) makeVolumes(ctx, following context.Context, pod *corev1.Pod) (map[string]string, error) {
	paths := map[string]string{}
	for _, v := range pod.Spec.Volumes {
		dir := path.Join(podsDir, string(pod.UID), "volumes", v.Name)
		paths[v.Name] = dir
		var err error
		switch {
		case v.HostPath != nil:
			paths[v.Name] = v.HostPath.Path
			if ptr.Deref(v.HostPath.Type, "") == corev1.HostPathDirectoryOrCreate {
				err = h.run(ctx, "mkdir -p "+quoted(v.HostPath.Path))
			}
		case v.EmptyDir != nil:
			err = os.MkdirAll(filepath.Join(h.root, dir), 0o777)
		case v.ConfigMap != nil:
			err = h.followConfigMap(ctx, following, pod, v.ConfigMap.Name, filepath.Join(h.root, dir))
		case v.Projected != nil:
			err = h.project(ctx, pod, v.Projected.Sources, filepath.Join(h.root, dir))
		default:
			err = fmt.Errorf("it is of an unknown kind")
		}
		if err != nil {
			return nil, fmt.Errorf("make volume %s: %w", v.Name, err)
		}
	}
	return paths, nil
}

// followConfigMap returns when the volume has the ConfigMap's files, and replaces them whenever the ConfigMap changes.
func (h *host) followConfigMap(ctx, following context.Context, pod *corev1.Pod, name, dir string) error {
	api := theClient.CoreV1().ConfigMaps(pod.Namespace)
	options := metav1.ListOptions{FieldSelector: "metadata.name=" + name}
	written := make(chan struct{})
	go func() {
		for first := true; following.Err() == nil; {
			watch, err := api.Watch(following, options)
			if err != nil {
				select {
				case <-following.Done():
				case <-time.After(time.Second):
				}
				continue
			}
			for event := range watch.ResultChan() {
				config, ok := event.Object.(*corev1.ConfigMap)
				if !ok || event.Type == "DELETED" {
					continue
				}
				files := map[string]string{}
				for key, text := range config.Data {
					files[key] = text
				}
				if err := writeFiles(dir, files); err == nil && first {
					first = false
					close(written)
				}
			}
		}
	}()
	select {
	case <-written:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("await ConfigMap %s: %w", name, context.Cause(ctx))
	}
}

// project writes a projected volume.
func (h *host) project(ctx context.Context, pod *corev1.Pod, sources []corev1.VolumeProjection, dir string) error {
	files := map[string]string{}
	for _, source := range sources {
		switch {
		case source.ServiceAccountToken != nil:
			answer, err := theClient.CoreV1().ServiceAccounts(pod.Namespace).CreateToken(ctx, pod.Spec.ServiceAccountName, &authenticationv1.TokenRequest{
				Spec: authenticationv1.TokenRequestSpec{
					ExpirationSeconds: source.ServiceAccountToken.ExpirationSeconds,
					BoundObjectRef:    &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID},
				},
			}, metav1.CreateOptions{})
			if err != nil {
				return err
			}
			files[source.ServiceAccountToken.Path] = answer.Status.Token
		case source.ConfigMap != nil:
			config, err := theClient.CoreV1().ConfigMaps(pod.Namespace).Get(ctx, source.ConfigMap.Name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			for _, item := range source.ConfigMap.Items {
				files[item.Path] = config.Data[item.Key]
			}
		case source.DownwardAPI != nil:
			for _, item := range source.DownwardAPI.Items {
				value, known := field(pod, h.node, item.FieldRef.FieldPath)
				if !known {
					return fmt.Errorf("unknown field %s", item.FieldRef.FieldPath)
				}
				files[item.Path] = value
			}
		default:
			return fmt.Errorf("a source is of an unknown kind")
		}
	}
	return writeFiles(dir, files)
}

// writeFiles replaces the files of a volume in one step, as kubelet does: they are links through ..data, which is a link to a directory.
func writeFiles(dir string, files map[string]string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	fresh, err := os.MkdirTemp(dir, "..")
	if err != nil {
		return err
	}
	if err := os.Chmod(fresh, 0o755); err != nil {
		return err
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(fresh, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	data := filepath.Join(dir, "..data")
	before, _ := os.Readlink(data) // none the first time
	if err := os.Symlink(filepath.Base(fresh), data+"_tmp"); err != nil {
		return err
	}
	if err := os.Rename(data+"_tmp", data); err != nil {
		return err
	}
	for name := range files {
		if err := os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)); err != nil && !os.IsExist(err) {
			return err
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if _, wanted := files[entry.Name()]; !wanted && entry.Type()&os.ModeSymlink != 0 && entry.Name() != "..data" {
			if err := os.Remove(filepath.Join(dir, entry.Name())); err != nil {
				return err
			}
		}
	}
	if before != "" {
		return os.RemoveAll(filepath.Join(dir, before))
	}
	return nil
}
