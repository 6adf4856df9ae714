// SPDX-License-Identifier: Apache-2.0

package device

import "errors"

// ErrUnsupported says that the GPU, or its driver, has no such setting: trying again does not help, and nothing of it is set.
var ErrUnsupported = errors.New("the GPU, or its driver, does not support it")

// ComputeMode says how many processes may have a GPU (nvml.h, nvmlComputeMode_t).
type ComputeMode string

// The modes that drivers still have.
const (
	ComputeModeDefault          ComputeMode = "Default"          // any number
	ComputeModeExclusiveProcess ComputeMode = "ExclusiveProcess" // one; under MPS, its server
	ComputeModeProhibited       ComputeMode = "Prohibited"       // none
)
