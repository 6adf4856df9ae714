// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/rest"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/explain"
)

// exporterSelectors select the pods of dcgm-exporter: those of its chart (NVIDIA/dcgm-exporter, deployment/templates/_helpers.tpl), and those
// of GPU Operator (NVIDIA/gpu-operator, assets/state-dcgm-exporter/0800_daemonset.yaml).
var exporterSelectors = []string{"app.kubernetes.io/name=dcgm-exporter", "app=nvidia-dcgm-exporter"}

// exporterPort is the usual port of both. A container port with the name exporterPortName overrides it.
const (
	exporterPortName = "metrics"
	exporterPort     = 9400
)

// Bounds of what is read. An exporter of eight GPUs writes about 50 KiB.
const (
	scrapesAtOnce   = 8
	scrapeTime      = 5 * time.Second
	allScrapesTime  = time.Minute
	mostMetricsSize = 4 << 20
	mostDetail      = 200 // runes
)

// Scraper returns the metrics page of a pod. It is safe for concurrent use. The page and the error may contain any text: the pod writes it.
type Scraper func(ctx context.Context, pod *corev1.Pod) ([]byte, error)

// NewScraper returns a scraper that reads through the API server's pod proxy, with the viewer's rights. NewScraper itself does not connect.
//
// The scraper has its own HTTP client, for two reasons. A pod can redirect to another host, and the API server passes the redirect on
// (k8s.io/apimachinery, pkg/util/proxy/transport.go): a client that follows it sends the viewer's token to that host. And client-go reads the
// body of an error whole, whatever its size.
func NewScraper(config *rest.Config) (Scraper, error) {
	base, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil, fmt.Errorf("find the API server: %w", err)
	}
	transport, err := rest.TransportFor(config)
	if err != nil {
		return nil, fmt.Errorf("configure pod proxy: %w", err)
	}
	client := &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return func(ctx context.Context, pod *corev1.Pod) ([]byte, error) {
		port := strconv.Itoa(int(portOf(pod)))
		page := base.JoinPath("api/v1/namespaces", pod.Namespace, "pods", pod.Name+":"+port, "proxy/metrics")
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, page.String(), nil)
		if err != nil {
			return nil, err
		}
		response, err := client.Do(request)
		if err != nil {
			return nil, errors.Unwrap(err) // Do returns a url.Error, which adds the address of the page
		}
		defer response.Body.Close()
		body, err := io.ReadAll(io.LimitReader(response.Body, mostMetricsSize+1))
		switch {
		case err != nil:
			return nil, err
		case response.StatusCode != http.StatusOK:
			return nil, statusError(response.StatusCode, body)
		case len(body) > mostMetricsSize:
			return nil, fmt.Errorf("the answer has more than %d MiB", mostMetricsSize>>20)
		}
		return body, nil
	}, nil
}

// statusError returns the API server's error if the body is one, and otherwise an error with the status code alone.
func statusError(code int, body []byte) error {
	var status metav1.Status
	if err := json.Unmarshal(body, &status); err == nil && status.Kind == "Status" && status.Code == int32(code) {
		return &apierrors.StatusError{ErrStatus: status}
	}
	return fmt.Errorf("HTTP status %d", code)
}

func portOf(pod *corev1.Pod) int32 {
	for _, c := range pod.Spec.Containers {
		for _, p := range c.Ports {
			if p.Name == exporterPortName {
				return p.ContainerPort
			}
		}
	}
	return exporterPort
}

// ReadMetrics sets the metrics of the nodes' devices, or the reason why a node has none. It looks for pods of dcgm-exporter in the namespace, or
// in all namespaces if it is empty. It fails only if ctx is done.
func (c Cluster) ReadMetrics(ctx context.Context, nodes []Node, namespace string) error {
	exporters, err := c.exporters(ctx, nodes, namespace)
	limited, cancel := context.WithTimeout(ctx, allScrapesTime)
	defer cancel()
	var scrapes errgroup.Group
	scrapes.SetLimit(scrapesAtOnce)
	for i := range nodes {
		n := &nodes[i]
		switch {
		case len(n.Devices) == 0:
		case err != nil:
			n.NoMetrics = &NoMetrics{Reason: short(err)}
		default:
			scrapes.Go(func() error {
				n.Exporter, n.NoMetrics = c.readMetrics(limited, n, exporters[n.Name])
				return nil
			})
		}
	}
	_ = scrapes.Wait() // no scrape returns an error
	return ctx.Err()
}

// readMetrics sets the metrics of one node's devices. It returns the pod that it read, or why there are no metrics.
func (c Cluster) readMetrics(ctx context.Context, n *Node, pods []*corev1.Pod) (*v1alpha1.PodReference, *NoMetrics) {
	pod, none := chooseExporter(pods)
	if none != nil {
		return nil, none
	}
	if ctx.Err() != nil {
		return nil, &NoMetrics{Reason: fmt.Sprintf("not read within %s: name the nodes that you want to see", allScrapesTime)}
	}
	missing := func(reason, detail string) (*v1alpha1.PodReference, *NoMetrics) {
		return nil, &NoMetrics{reason, fmt.Sprintf("pod %s/%s%s", pod.Namespace, pod.Name, detail)}
	}
	ctx, cancel := context.WithTimeout(ctx, scrapeTime)
	defer cancel()
	page, err := c.Scrape(ctx, pod)
	switch {
	case apierrors.IsForbidden(err):
		return missing("you may not get pods/proxy", ": "+short(err))
	case errors.Is(err, context.DeadlineExceeded):
		return missing("dcgm-exporter could not be read in time", "")
	case err != nil:
		return missing("dcgm-exporter could not be read", ": "+short(err))
	}
	found, err := parseMetrics(page)
	if err != nil {
		return missing("the page of dcgm-exporter could not be parsed", ": "+short(err))
	}
	if n.measure(found) == 0 {
		return missing("dcgm-exporter has no metrics of the node's GPUs", "")
	}
	return &v1alpha1.PodReference{UID: pod.UID, Namespace: pod.Namespace, Name: pod.Name}, nil
}

// exporters returns the pods that have labels of dcgm-exporter, by node.
func (c Cluster) exporters(ctx context.Context, nodes []Node, namespace string) (map[string][]*corev1.Pod, error) {
	options := metav1.ListOptions{}
	if len(nodes) == 1 {
		options.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", nodes[0].Name).String()
	}
	found := map[string][]*corev1.Pod{}
	for _, selector := range exporterSelectors {
		options.LabelSelector = selector
		err := each(ctx, "pods", options, c.Client.CoreV1().Pods(namespace).List, func(p *corev1.Pod) {
			found[p.Spec.NodeName] = append(found[p.Spec.NodeName], p)
		})
		if apierrors.IsForbidden(err) && namespace == metav1.NamespaceAll {
			return nil, fmt.Errorf("list pods of all namespaces (give that of dcgm-exporter with --exporter-namespace): %w", errors.Unwrap(err))
		}
		if err != nil {
			return nil, err
		}
	}
	return found, nil
}

// short returns an error in one line of bounded length. A pod can write the error. Its text is made plain here and not only where it is printed,
// because JSON has it as well.
func short(err error) string {
	return explain.Bounded(Style{UTF8: true}.plain(explain.OneLine(err.Error())), mostDetail)
}
