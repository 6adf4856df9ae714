// SPDX-License-Identifier: Apache-2.0

package device

import "errors"

// ErrUnsupported means that the GPU or its driver does not support a setting. A retry does not help, and nothing was set.
var ErrUnsupported = errors.New("the GPU, or its driver, does not support it")

// ComputeMode is how many processes may use a GPU (nvml.h, nvmlComputeMode_t).
type ComputeMode string

// The modes of current drivers.
const (
	ComputeModeDefault          ComputeMode = "Default"          // any number
	ComputeModeExclusiveProcess ComputeMode = "ExclusiveProcess" // one; under MPS, its server
	ComputeModeProhibited       ComputeMode = "Prohibited"       // none
)
