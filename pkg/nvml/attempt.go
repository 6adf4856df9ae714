// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"time"
)

// errNoAnswer means that a call into the driver took too long.
var errNoAnswer = errors.New("the GPU does not answer")

// attempt makes a driver call about one GPU (by UUID; empty for none in particular) and gives it up after a timeout, because it
// may never return. The call then continues in its goroutine with its own use of the session, and no other call about that GPU
// starts until it ends. Under n.scanning, within a use of the session.
func attempt[T any](n *Node, about string, call func() (T, error)) (T, error) {
	var none T
	if !n.ended(about) {
		return none, errNoAnswer
	}
	var answer T
	var err error
	ended := make(chan struct{})
	session := n.session
	session.share()
	go func() {
		defer close(ended)
		defer session.close()
		answer, err = call()
	}()
	timer := time.NewTimer(n.options.patience)
	defer timer.Stop()
	select {
	case <-ended:
		return answer, err
	case <-timer.C:
		n.late[about] = ended
		return none, errNoAnswer
	}
}

// ended reports whether no call about a GPU continues after its timeout.
func (n *Node) ended(about string) bool {
	select {
	case <-n.late[about]:
		delete(n.late, about)
		return true
	default:
		return n.late[about] == nil
	}
}

// collect removes calls that returned after their timeout, so that the next scan calls again.
func (n *Node) collect() {
	for about := range n.late {
		if n.ended(about) {
			n.renewed = true
		}
	}
}
