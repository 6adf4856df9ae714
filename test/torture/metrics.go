// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/internal/broadcast"
)

// ours selects the pods of agent and controller.
const ours = "app.kubernetes.io/instance=" + install.Release

// conflictMetrics count the times that the ledger refused one API a device of the other.
var conflictMetrics = []string{"tandem_prepare_conflicts_total", "tandem_allocate_conflicts_total"}

const (
	scrapeEvery    = time.Second
	scrapePatience = time.Second
	startMetric    = "process_start_time_seconds"
)

// scraper adds up counters over the restarts of those who count: what a process counted between its last scrape and its end is
// lost, so a fault scrapes a process before it kills it.
type scraper struct {
	client     kubernetes.Interface
	http       http.Client
	statistics *statistics

	mu sync.Mutex
	// last is what each process said last, by address.
	last map[string]reading
}

type reading struct {
	// started tells processes of one address apart.
	started, conflicts float64
}

func newScraper(client kubernetes.Interface, c *cluster.Cluster, t *statistics) *scraper {
	transport := &http.Transport{DialContext: c.DialContext, DisableKeepAlives: true}
	return &scraper{
		client: client, http: http.Client{Transport: transport, Timeout: scrapePatience}, statistics: t, last: map[string]reading{},
	}
}

// run scrapes until ctx is done.
func (s *scraper) run(ctx context.Context) error {
	for ctx.Err() == nil {
		s.scrape(ctx)
		broadcast.Sleep(ctx, scrapeEvery)
	}
	return nil
}

// scrape reads whom it can reach: one that is frozen or down is read later.
func (s *scraper) scrape(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 2*scrapePatience)
	defer cancel()
	pods, err := s.client.CoreV1().Pods(install.Namespace).List(ctx, metav1.ListOptions{LabelSelector: ours})
	if err != nil {
		return
	}
	for _, pod := range pods.Items {
		if address := endpoint(pod); address != "" {
			if now, err := s.read(ctx, address); err == nil {
				s.count(address, now)
			}
		}
	}
}

// endpoint is where a pod serves its metrics; empty where it does not, or not yet.
func endpoint(pod corev1.Pod) string {
	for _, container := range pod.Spec.Containers {
		for _, port := range container.Ports {
			if (port.Name == "http" || port.Name == "metrics") && pod.Status.PodIP != "" {
				return fmt.Sprintf("%s:%d", pod.Status.PodIP, port.ContainerPort)
			}
		}
	}
	return ""
}

func (s *scraper) read(ctx context.Context, address string) (reading, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/metrics", nil)
	if err != nil {
		return reading{}, err
	}
	response, err := s.http.Do(request)
	if err != nil {
		return reading{}, err
	}
	defer response.Body.Close()
	return parse(response.Body)
}

func parse(body io.Reader) (reading, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(body)
	if err != nil {
		return reading{}, fmt.Errorf("read metrics: %w", err)
	}
	now := reading{started: sum(families[startMetric])}
	for _, name := range conflictMetrics {
		now.conflicts += sum(families[name])
	}
	return now, nil
}

func sum(family *dto.MetricFamily) float64 {
	total := 0.0
	for _, metric := range family.GetMetric() {
		total += metric.GetCounter().GetValue() + metric.GetGauge().GetValue()
	}
	return total
}

func (s *scraper) count(address string, now reading) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.last[address]
	if before.started != now.started || before.conflicts > now.conflicts {
		before.conflicts = 0
	}
	s.last[address] = now
	s.statistics.add(func(c *Counters) { c.Conflicts += int(now.conflicts - before.conflicts) })
}
