// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
)

// Holds are the names of the ledger's records on a node.
func (s *Story) Holds(n *cluster.Node) (names []string) {
	s.Helper()
	root, err := n.Root()
	if err != nil {
		s.Fatal(err)
	}
	entries, err := os.ReadDir(filepath.Join(root, "run/tandem/holds"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.Fatal(err)
	}
	for _, entry := range entries {
		if !strings.HasPrefix(entry.Name(), ".") {
			names = append(names, entry.Name())
		}
	}
	return names
}

// Records are the contents of the ledger's records on a node, for readers.
func (s *Story) Records(n *cluster.Node) string {
	return s.On(n, "sh", "-c", `cd /run/tandem/holds; for f in *; do [ ! -e "$f" ] || head -n 1 "$f"; done`)
}

// Empty wants no hold in the ledger of the node.
func (s *Story) Empty() error {
	if holds := s.Holds(s.Node()); len(holds) > 0 {
		return fmt.Errorf("holds: %v", holds)
	}
	return nil
}

// HoldsByKind counts the records of claims and of limits in the ledger of the node.
func (s *Story) HoldsByKind() (claims, limits int) {
	s.Helper()
	for _, hold := range s.Holds(s.Node()) {
		if strings.HasPrefix(hold, "claim") {
			claims++
		} else {
			limits++
		}
	}
	return claims, limits
}

// WantHolds waits for so many holds in the ledger of the node.
func (s *Story) WantHolds(claims, limits int) {
	s.Helper()
	s.Await(Soon, fmt.Sprintf("%d holds of claims and %d of limits", claims, limits), func() error {
		if gotClaims, gotLimits := s.HoldsByKind(); gotClaims != claims || gotLimits != limits {
			return fmt.Errorf("%d and %d: %v", gotClaims, gotLimits, s.Holds(s.Node()))
		}
		return nil
	})
}

// AllFree waits until kubelet offers every GPU to limits again, the slices offer every GPU to claims, the ledger is empty, and nothing
// is left of what claims' containers shared.
func (s *Story) AllFree() {
	s.Helper()
	s.Await(Patient, "all GPUs to be free", s.Free)
}

// Free is the condition that AllFree waits for.
func (s *Story) Free() error {
	if err := errors.Join(s.OfferedToPods(s.Limits), s.OfferedToClaims(s.Offered), s.Empty()); err != nil {
		return err
	}
	return s.NothingLeft()
}

// NothingLeft is NothingShared, or nil if DaemonsStay is set.
func (s *Story) NothingLeft() error {
	if s.DaemonsStay {
		return nil
	}
	return s.NothingShared()
}

// NothingShared holds once nothing is left of what was shared: on the node no process of MPS, no directory, no record, no CDI
// device, and in the cluster no pod of a daemon.
func (s *Story) NothingShared() error {
	var left []string
	for _, dir := range []string{"/run/tandem/mps", "/run/tandem/sharing"} {
		entries, err := os.ReadDir(s.NodePath(dir))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		for _, entry := range entries {
			left = append(left, filepath.Join(dir, entry.Name()))
		}
	}
	for _, pod := range s.Daemons() {
		left = append(left, "pod "+pod.Name)
	}
	if len(left) == 0 {
		left = strings.Fields(s.On(s.Node(), "sh", "-c", "find /var/run/cdi -name '*-sharing-*'; pgrep -l nvidia-cuda-mps; pgrep -lx mps-daemon; true"))
	}
	if len(left) > 0 {
		return fmt.Errorf("left of sharing: %v", left)
	}
	return nil
}

// Daemons are the pods of MPS daemons.
func (s *Story) Daemons() []corev1.Pod {
	s.Helper()
	list, err := s.Client.CoreV1().Pods(install.Namespace).List(s.Ctx, metav1.ListOptions{LabelSelector: DaemonLabel})
	if err != nil {
		s.Fatal(err)
	}
	return list.Items
}
