// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// refusedFor is how long the API server must refuse the agent's token. After a long absence of the API server kubelet renews an
// expired token within two minutes.
const refusedFor = 3 * time.Minute

// errPodGone ends an agent whose pod is gone and whose container runtime does not end it. It would serve limits with an outdated list
// of pods, and keep the ledger's lock from the next agent.
var errPodGone = errors.New("the API server no longer has the agent's pod")

// endWithPod returns errPodGone once the agent's pod is gone, and nil when ctx is done. An API server that is away says nothing.
func (a *Agent) endWithPod(ctx context.Context, pods *podstate.Pods) error {
	for broadcast.Sleep(ctx, a.times.ownPod) {
		if err := a.podGone(pods); err != nil {
			klog.FromContext(ctx).Error(err, "Ending, so that the next agent can serve the node")
			return err
		}
	}
	return nil
}

func (a *Agent) podGone(pods *podstate.Pods) error {
	if refused := a.token.refused(); refused >= refusedFor {
		return fmt.Errorf("%w: the API server has refused the pod's token for %s", errPodGone, refused.Round(time.Second))
	}
	if a.config.PodUID == "" {
		return nil
	}
	if gone := pods.UnwantedSince(a.config.PodUID); !gone.IsZero() && time.Since(gone) >= a.times.goneFor {
		return fmt.Errorf("%w: the pod with UID %s should have ended at %s", errPodGone, a.config.PodUID, gone.Format(time.RFC3339))
	}
	return nil
}

// token records whether the API server takes the agent's token. It is safe for concurrent use.
type token struct {
	mu sync.Mutex
	// taken is set once the API server took it. An agent that was refused from its start on serves what it holds: to end would not help.
	taken bool
	// first and last refusal in a row.
	first, last time.Time
}

// watch returns a transport that records the answers of another one.
func (k *token) watch(next http.RoundTripper) http.RoundTripper { return transport{next, k} }

func (k *token) answered(code int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case code == http.StatusUnauthorized:
		k.last = time.Now()
		if k.first.IsZero() {
			k.first = k.last
		}
	case code < http.StatusInternalServerError:
		k.taken, k.first, k.last = true, time.Time{}, time.Time{}
	}
}

// refused returns how long the API server has refused each request, after it took the token before.
func (k *token) refused() time.Duration {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.taken {
		return 0
	}
	return k.last.Sub(k.first)
}

type transport struct {
	http.RoundTripper
	token *token
}

// RoundTrip implements http.RoundTripper.
func (t transport) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := t.RoundTripper.RoundTrip(request)
	if err == nil {
		t.token.answered(response.StatusCode)
	}
	return response, err
}

// WrappedRoundTripper lets client-go find the transport below (k8s.io/apimachinery/pkg/util/net).
func (t transport) WrappedRoundTripper() http.RoundTripper { return t.RoundTripper }
