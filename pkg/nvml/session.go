// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"sync"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
)

// session keeps NVML initialised while it has users or is held (see the package documentation).
type session struct {
	library gonvml.Interface

	mu    sync.Mutex
	users int
	// holding counts as one user between uses.
	holding bool
}

// open starts a use; close ends it. On an error there is nothing to close.
func (s *session) open() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.users == 0 && !s.holding {
		if ret := s.library.Init(); ret != gonvml.SUCCESS {
			return initError(ret)
		}
	}
	s.users++
	return nil
}

// share starts another use within a use.
func (s *session) share() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.users++
}

func (s *session) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.users--
	if s.users == 0 && !s.holding {
		s.library.Shutdown()
	}
}

// hold sets whether the session stays open between uses. It is called within a use.
func (s *session) hold(hold bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.holding = hold
}

// release closes a held session without users.
func (s *session) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.holding && s.users == 0 {
		s.library.Shutdown()
	}
	s.holding = false
}

// initError adds what an administrator can do.
func initError(ret gonvml.Return) error {
	e := &NoDriverError{Cause: returnError{ret}}
	switch ret {
	case gonvml.ERROR_DRIVER_NOT_LOADED:
		e.Looked = []string{"kernel: the nvidia module is not loaded"}
	case gonvml.ERROR_LIB_RM_VERSION_MISMATCH:
		e.Looked = []string{"kernel: the nvidia module that is loaded has another version than the library"}
	case gonvml.ERROR_NO_PERMISSION, gonvml.ERROR_UNKNOWN:
		e.Looked = []string{"/dev/nvidiactl: opening it must be allowed (a privileged container, or a runtime class)"}
	}
	return e
}

// returnError is NVML's answer as an error.
type returnError struct{ ret gonvml.Return }

func (e returnError) Error() string { return "NVML answers " + e.ret.Error() }
