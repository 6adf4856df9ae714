// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"fmt"
	"strings"
)

// ErrNoDriver means that the node has no working NVIDIA driver now. Run waits for one.
var ErrNoDriver = errors.New("no NVIDIA driver")

// ErrDriverReplaced means that the driver's library on disk is not the one that this process has bound. Only a new process can use
// the new library (see the package documentation).
var ErrDriverReplaced = errors.New("the NVIDIA driver was replaced")

// NoDriverError is an ErrNoDriver with the checked paths.
type NoDriverError struct {
	// Looked has one "<path>: <result>" for each checked path.
	Looked []string
	// Cause is set if a library was found and did not work.
	Cause error
	// NoHardware is set if sysfs shows no NVIDIA GPU: no driver is missing then.
	NoHardware bool
}

func (e *NoDriverError) Error() string {
	text := ErrNoDriver.Error()
	if e.Cause != nil {
		text += fmt.Sprintf(": %v", e.Cause)
	}
	if len(e.Looked) > 0 {
		text += " (looked at " + strings.Join(e.Looked, "; ") + ")"
	}
	return text
}

// Is makes a NoDriverError an ErrNoDriver.
func (e *NoDriverError) Is(target error) bool { return target == ErrNoDriver }

func (e *NoDriverError) Unwrap() error { return e.Cause }
