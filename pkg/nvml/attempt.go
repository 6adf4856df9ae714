// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"time"
)

// errNoAnswer means that a call into the driver took too long.
var errNoAnswer = errors.New("the GPU does not answer")

// wholeDriver is what attempts that concern no particular GPU are about: opening the session and counting the GPUs.
const wholeDriver = "driver"

// attempt makes a driver call about a GPU or the driver, within its own use of the session unless s is nil. It gives the call up after a
// timeout, because it may never return. The call then continues in its goroutine, and no other call about the same starts until it ends;
// undo, unless nil, gets its result. Under n.scanning.
func attempt[T any](n *Node, about string, s *session, call func() (T, error), undo func(T)) (T, error) {
	var none T
	if !n.ended(about) {
		return none, errNoAnswer
	}
	if s != nil {
		s.share()
	}
	answer, givenUp, ended := make(chan outcome[T]), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		value, err := call()
		if s != nil {
			s.close()
		}
		if !answered(answer, outcome[T]{value, err}, givenUp) && err == nil && undo != nil {
			undo(value)
		}
	}()
	timer := time.NewTimer(n.options.patience)
	defer timer.Stop()
	select {
	case o := <-answer:
		return o.value, o.err
	case <-timer.C:
		close(givenUp)
		n.late[about] = ended
		return none, errNoAnswer
	}
}

// ended reports whether no call about a GPU or the driver continues after its timeout.
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
