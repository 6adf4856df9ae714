// SPDX-License-Identifier: Apache-2.0

package nodelabels

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
)

// Manager is the field manager of the labels that Tandem writes.
const Manager = "tandem-node-labels"

// nfdLabels is the annotation in which Node Feature Discovery lists the labels that it manages (node-feature-discovery, api/nfd/v1alpha1).
// GPU Feature Discovery writes its labels through it. Where a label already has the right value, NFD does not become a field manager of it.
const nfdLabels = "nfd.node.kubernetes.io/feature-labels"

// requestTimeout bounds the requests of one attempt.
const requestTimeout = 30 * time.Second

// newRetries returns how long a Writer waits after each of several errors in a row. If the agents of a large cluster have no right to write
// labels, their attempts must not burden the API server.
func newRetries() wait.Backoff {
	return wait.Backoff{Duration: 10 * time.Second, Factor: 2, Jitter: 0.5, Steps: 6, Cap: 5 * time.Minute}
}

// Config of a Writer. All fields are required.
type Config struct {
	Nodes    typedcorev1.NodeInterface
	NodeName string
	// Want returns the labels that the node is to have. If known is false, the node keeps those that it has.
	Want func() (labels map[string]string, known bool)
	// Changed returns a channel that is closed when Want may return something else. The Writer calls it before Want.
	Changed func() <-chan struct{}
	// Seen returns the node's labels as a watch reports them. It makes no request.
	Seen func() map[string]string
	// Interval is how often the Writer compares the labels of Seen with those after its last attempt.
	Interval time.Duration
	// Recorder receives an event on the node when another field manager has the labels.
	Recorder   record.EventRecorder
	Registerer prometheus.Registerer
}

// Writer writes the labels of a node by server-side apply. While another field manager owns one of them it writes none, and removes its
// own. The agent runs one.
type Writer struct {
	Config
	written  prometheus.Gauge
	failures prometheus.Counter

	// settled is set once the node has what want asks for; the node's labels were seen then.
	settled    bool
	want, seen map[string]string
	// other says who owns the labels instead, and failure is the last error. Each is reported once.
	other, failure string
}

// NewWriter returns a Writer that does nothing before Run.
func NewWriter(c Config) *Writer {
	w := &Writer{
		Config: c,
		written: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "tandem_node_labels", Help: "Labels of GPU Feature Discovery that the agent has on its node; 0 while another field manager has them.",
		}),
		failures: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "tandem_node_labels_failures_total", Help: "Failed attempts to write the labels of GPU Feature Discovery to the node.",
		}),
	}
	c.Registerer.MustRegister(w.written, w.failures)
	return w
}

// Run writes the labels until ctx is done, and returns nil then. The labels stay. It makes no request unless the labels have changed.
func (w *Writer) Run(ctx context.Context) error {
	ticker := time.NewTicker(w.Interval)
	defer ticker.Stop()
	retries := newRetries()
	for {
		changed, again := w.Changed(), ticker.C
		err := w.write(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			after := retries.Step()
			w.fail(ctx, err, after)
			again = time.After(after)
		default:
			retries = newRetries()
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-again:
		}
	}
}

func (w *Writer) fail(ctx context.Context, err error, after time.Duration) {
	w.failures.Inc()
	if text := err.Error(); text != w.failure {
		w.failure = text
		klog.FromContext(ctx).Error(err, "Cannot write the node's labels. The agent tries again", "after", after.Round(time.Second))
	}
}

// write gives the node the labels of Want, unless another field manager has one of them.
func (w *Writer) write(ctx context.Context) error {
	want, known := w.Want()
	if !known || w.settled && maps.Equal(want, w.want) && maps.Equal(w.Seen(), w.seen) {
		return nil
	}
	w.settled = false
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	node, err := w.Nodes.Get(ctx, w.NodeName, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("get node %s: %w", w.NodeName, err)
	}
	apply := want
	other := otherOwner(node, want)
	if other != "" || len(want) == 0 {
		apply = listedByNFD(node)
	}
	w.report(ctx, other)
	if !maps.Equal(ownedLabels(node), apply) {
		if node, err = applyTo(ctx, w.Nodes, node, apply); err != nil {
			return err
		}
		klog.FromContext(ctx).Info("Wrote the node's labels", "labels", len(apply))
	}
	w.written.Set(float64(len(apply)))
	w.settled, w.want, w.seen, w.failure = true, want, node.Labels, ""
	return nil
}

// report reports once that another field manager has the labels, and once that it no longer has them.
func (w *Writer) report(ctx context.Context, other string) {
	before := w.other
	w.other = other
	switch {
	case before != "" && other == "":
		klog.FromContext(ctx).Info("No other field manager has the node's labels any more")
	case before == "" && other != "":
		klog.FromContext(ctx).Info("Writing no labels to the node", "reason", other)
		node := &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: w.NodeName, UID: types.UID(w.NodeName)}
		w.Recorder.Eventf(node, corev1.EventTypeNormal, "NodeLabelsNotWritten", "Tandem writes no labels of GPU Feature Discovery to this node, because %s. "+
			"To keep GPU Feature Discovery, set the chart's gfd.enabled=false. Otherwise uninstall it and remove its labels: Tandem then writes its own", other)
	}
}

// RemoveFromAll removes the labels of all Writers from all nodes. It is idempotent. On an error it goes on with the other nodes. Uninstallation
// calls it, after the agents have lost their rights.
func RemoveFromAll(ctx context.Context, nodes typedcorev1.NodeInterface) (removed int, err error) {
	const atOnce = 100 // a Node lists the machine's images, and so may have 50 KiB
	var errs []error
	for options := (metav1.ListOptions{Limit: atOnce}); ; {
		list, err := nodes.List(ctx, options)
		if err != nil {
			return removed, errors.Join(append(errs, fmt.Errorf("list nodes: %w", err))...)
		}
		for i := range list.Items {
			node := &list.Items[i]
			keep := listedByNFD(node)
			if maps.Equal(ownedLabels(node), keep) {
				continue
			}
			if _, err := applyTo(ctx, nodes, node, keep); err == nil {
				removed++
			} else if !apierrors.IsNotFound(err) {
				errs = append(errs, err)
			}
		}
		if options.Continue = list.Continue; options.Continue == "" {
			return removed, errors.Join(errs...)
		}
	}
}

// applyTo makes Manager the owner of exactly these labels. It removes no label that another field manager owns as well, and fails where another
// one owns a label with another value. With the UID it does not create a node that was deleted.
func applyTo(ctx context.Context, nodes typedcorev1.NodeInterface, node *corev1.Node, labels map[string]string) (*corev1.Node, error) {
	applied, err := nodes.Apply(ctx, applycorev1.Node(node.Name).WithUID(node.UID).WithLabels(labels), metav1.ApplyOptions{FieldManager: Manager})
	if err != nil {
		return nil, fmt.Errorf("apply the labels of node %s: %w", node.Name, err)
	}
	return applied, nil
}

// ownedLabels are the labels of the node that Manager owns.
func ownedLabels(node *corev1.Node) map[string]string {
	owned := map[string]string{}
	for _, entry := range node.ManagedFields {
		if isOurs(entry) {
			for key := range labelsOf(entry) {
				if value, found := node.Labels[key]; found {
					owned[key] = value
				}
			}
		}
	}
	return owned
}

func isOurs(entry metav1.ManagedFieldsEntry) bool {
	return entry.Manager == Manager && entry.Operation == metav1.ManagedFieldsOperationApply
}

// listedByNFD are the labels that Manager owns and Node Feature Discovery manages. It would not write them again before its next resync, by
// default within an hour.
func listedByNFD(node *corev1.Node) map[string]string {
	labels, listed := ownedLabels(node), nfdList(node)
	maps.DeleteFunc(labels, func(key, _ string) bool { return !slices.Contains(listed, key) })
	return labels
}

func nfdList(node *corev1.Node) []string { return strings.Split(node.Annotations[nfdLabels], ",") }

// otherOwner says who else has one of the labels, or GPU Feature Discovery's timestamp; empty if there is none.
func otherOwner(node *corev1.Node, want map[string]string) string {
	if len(want) == 0 {
		return ""
	}
	keys := append(slices.Sorted(maps.Keys(want)), Prefix+timestamp)
	for _, entry := range slices.SortedFunc(slices.Values(node.ManagedFields), func(a, b metav1.ManagedFieldsEntry) int { return cmp.Compare(a.Manager, b.Manager) }) {
		if isOurs(entry) {
			continue
		}
		labels := labelsOf(entry)
		for _, key := range keys {
			if labels[key] {
				return fmt.Sprintf("the field manager %s owns the label %s", entry.Manager, key)
			}
		}
	}
	listed := nfdList(node)
	for _, key := range keys {
		if slices.Contains(listed, key) {
			return fmt.Sprintf("Node Feature Discovery lists the label %s in the annotation %s", key, nfdLabels)
		}
	}
	return ""
}

// labelsOf returns the keys of the labels that an entry owns (sigs.k8s.io/structured-merge-diff, "f:" before the name of a field).
func labelsOf(entry metav1.ManagedFieldsEntry) map[string]bool {
	var fields struct {
		Metadata struct {
			Labels map[string]json.RawMessage `json:"f:labels"`
		} `json:"f:metadata"`
	}
	if entry.FieldsV1 == nil || json.Unmarshal(entry.FieldsV1.GetRawBytes(), &fields) != nil {
		return nil
	}
	keys := map[string]bool{}
	for field := range fields.Metadata.Labels {
		if key, ok := strings.CutPrefix(field, "f:"); ok {
			keys[key] = true
		}
	}
	return keys
}
