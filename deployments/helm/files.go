// SPDX-License-Identifier: Apache-2.0

// Package helm has files of the chart for programs.
package helm

import _ "embed"

// NVIDIAKeys is files/nvidia-keys.yaml of the chart: what each key of NVIDIA's charts does in Tandem's.
//
//go:embed tandem/files/nvidia-keys.yaml
var NVIDIAKeys []byte

// Values is values.yaml of the chart.
//
//go:embed tandem/values.yaml
var Values []byte
