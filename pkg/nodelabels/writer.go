// SPDX-License-Identifier: Apache-2.0

package nodelabels

import (
	"context"
	"errors"
	"maps"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/regarding"
)

// Manager is the field manager of the labels that Tandem writes.
const Manager = "tandem-node-labels"

const (
	// requestTimeout bounds the requests of one attempt.
	requestTimeout = 30 * time.Second
	// handBack is how long the Writer waits for Node Feature Discovery to remove the labels of a deleted NodeFeature. Node Feature Discovery
	// collects changes for a second (node-feature-discovery, pkg/nfd-master, nfdAPIUpdateHandler).
	handBack = 5 * time.Second
)

// newRetries returns how long a Writer waits after each of several errors in a row. If the agents of a large cluster have no right to write
// labels, their attempts must not burden the API server.
func newRetries() wait.Backoff {
	return wait.Backoff{Duration: 10 * time.Second, Factor: 2, Jitter: 0.5, Steps: 6, Cap: 5 * time.Minute}
}

// Config of a Writer. All fields are required.
type Config struct {
	Nodes    typedcorev1.NodeInterface
	NodeName string
	// UseNodeFeature makes the Writer write the labels to a NodeFeature object instead of to the Node. Node Feature Discovery then adds them to
	// the Node.
	UseNodeFeature bool
	// Features is the client for the NodeFeatures in the agent's namespace.
	Features dynamic.ResourceInterface
	// Owner returns the owners of the NodeFeature. The garbage collector deletes the NodeFeature when they are gone. The Writer calls Owner before
	// it writes the object.
	Owner func(ctx context.Context) ([]metav1.OwnerReference, error)
	// Want returns the labels that the node is to have. If known is false, the node keeps those that it has.
	Want func() (labels map[string]string, known bool)
	// Changed returns a channel that is closed when Want may return something else. The Writer calls it before Want.
	Changed func() <-chan struct{}
	// Seen returns the node's labels as a watch reports them. It makes no request.
	Seen func() map[string]string
	// Interval is how often the Writer compares the labels of Seen with those after its last attempt.
	Interval time.Duration
	// Recorder receives an event on the node when another field manager has the labels, or when the API server does not serve NodeFeatures that
	// the Writer is to write.
	Recorder   record.EventRecorder
	Registerer prometheus.Registerer
}

// output is a place for the labels of a node. Other field managers may write there as well.
type output interface {
	// read gets the object. The other methods use what it got.
	read(ctx context.Context) error
	// otherOwner says which other field manager has one of the labels; empty if there is none.
	otherOwner(want map[string]string) string
	// write makes these labels the only ones that Tandem has there. Without labels it removes those that Tandem has. It does not change what
	// other field managers have.
	write(ctx context.Context, labels map[string]string) (changed bool, err error)
}

// Writer writes the labels of a node by server-side apply, to the Node or to a NodeFeature. It removes the labels that an earlier agent has
// written to the other of these two. While another field manager owns one of the labels, it writes none, and removes its own. The agent runs
// one Writer.
type Writer struct {
	Config
	node     *onNode
	feature  *inFeature
	written  prometheus.Gauge
	failures prometheus.Counter

	// settled is set once the node has what want asks for; the node's labels were seen then.
	settled    bool
	want, seen map[string]string
	// left is set once the other place has nothing that an earlier agent wrote.
	left bool
	// other says who owns the labels instead, and failure is the last error. Each is reported once.
	other, failure string
}

// NewWriter returns a Writer that does nothing before Run.
func NewWriter(c Config) *Writer {
	node := &onNode{nodes: c.Nodes, name: c.NodeName}
	w := &Writer{
		Config: c, node: node, feature: &inFeature{features: c.Features, owner: c.Owner, node: node},
		written: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "tandem_node_labels", Help: "Labels of GPU Feature Discovery that the agent has on its node or in its NodeFeature; 0 while another field manager has them.",
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
		handedBack, err := w.write(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case handedBack:
			again = time.After(handBack)
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

// write gives the node the labels of Want, unless another field manager has one of them. handedBack means that the NodeFeature was deleted just
// now and Node Feature Discovery has yet to remove its labels: then write has written none.
func (w *Writer) write(ctx context.Context) (handedBack bool, err error) {
	want, known := w.Want()
	if !known || w.settled && maps.Equal(want, w.want) && maps.Equal(w.Seen(), w.seen) {
		return false, nil
	}
	w.settled = false
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	if err := w.node.read(ctx); err != nil {
		return false, err
	}
	// If NodeFeatures are not served, write ends here, before it removes labels from the Node.
	if err := w.readFeature(ctx, len(want) > 0); err != nil {
		return false, err
	}
	var use, leave output = w.node, w.feature
	if w.UseNodeFeature {
		use, leave = leave, use
	}
	other := use.otherOwner(want)
	// write removes the labels from one place before it writes them to the other: Node Feature Discovery does not write labels that the Node has.
	changed, err := leave.write(ctx, nil)
	if err != nil {
		return false, err
	}
	w.left = true
	if changed && !w.UseNodeFeature && len(want) > 0 {
		return true, nil
	}
	w.report(ctx, other)
	labels := want
	if other != "" {
		labels = nil
	}
	if _, err := use.write(ctx, labels); err != nil {
		return false, err
	}
	w.written.Set(float64(len(labels)))
	w.settled, w.want, w.seen, w.failure = true, want, w.node.node.Labels, ""
	return false, nil
}

// readFeature reads the NodeFeature. It returns errNoNodeFeatures only if the Writer is to write a NodeFeature.
func (w *Writer) readFeature(ctx context.Context, wanted bool) error {
	if !w.UseNodeFeature && w.left {
		return nil
	}
	err := w.feature.read(ctx)
	switch {
	case !errors.Is(err, errNoNodeFeatures):
		// Without the right to read NodeFeatures, no earlier agent has written one.
		if !w.UseNodeFeature && apierrors.IsForbidden(err) {
			return nil
		}
		return err
	case !w.UseNodeFeature || !wanted:
		return nil
	}
	w.written.Set(0)
	if w.other != err.Error() {
		w.event(corev1.EventTypeWarning, "the API server has no NodeFeatures. Install Node Feature Discovery: Tandem then writes the labels to a "+
			"NodeFeature within a few minutes. Otherwise set the chart's nfd.enableNodeFeatureApi=false (flags.useNodeFeatureAPI in a node configuration): "+
			"Tandem then writes the labels to the node itself")
	}
	w.other = err.Error()
	return err
}

// report reports once that another field manager has the labels, and once that it no longer has them.
func (w *Writer) report(ctx context.Context, other string) {
	before := w.other
	w.other = other
	switch {
	case before != "" && other == "":
		klog.FromContext(ctx).Info("The reason for not writing the node's labels is gone", "reason", before)
	case other != "" && (before == "" || before == errNoNodeFeatures.Error()):
		klog.FromContext(ctx).Info("Writing no labels to the node", "reason", other)
		w.event(corev1.EventTypeNormal, other+". To keep GPU Feature Discovery, set the chart's gfd.enabled=false. Otherwise uninstall it, and "+
			"remove its labels (or its NodeFeature, if this event names one): Tandem then writes its own")
	}
}

func (w *Writer) event(kind, why string) {
	w.Recorder.Eventf(regarding.Node(w.NodeName), kind, "NodeLabelsNotWritten", "Tandem writes no labels of GPU Feature Discovery to this node, because %s", why)
}
