// SPDX-License-Identifier: Apache-2.0

package device

// Settings of a GPU that stay when the process that changed them has ended, until the driver is unloaded (nvidia-smi(1), "-c" and "-ac").
// They are comparable.
type Settings struct {
	// ComputeMode is empty for a GPU that has none, such as one in MIG mode.
	ComputeMode ComputeMode `json:"computeMode,omitempty"`
	// MemoryClock and GraphicsClock are the application clocks in MHz; zero for a GPU that has none.
	MemoryClock   uint32 `json:"memoryClock,omitempty"`
	GraphicsClock uint32 `json:"graphicsClock,omitempty"`
}
