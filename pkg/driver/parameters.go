// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	kjson "sigs.k8s.io/json"
)

// Claim parameters are those of NVIDIA's DRA driver (api/nvidia.com/resource/v1beta1 there), so that claims written for it
// work unchanged. This version gives out GPUs and partitions as they are: what asks for more is refused, naming the field.
const (
	parametersAPIVersion = "resource.nvidia.com/v1beta1"
	kindGPUConfig        = "GpuConfig"
	kindMIGDeviceConfig  = "MigDeviceConfig"
	kindVFIODeviceConfig = "VfioDeviceConfig"
)

type gpuConfig struct {
	metav1.TypeMeta `json:",inline"`
	Sharing         *sharing `json:"sharing,omitempty"`
}

type migDeviceConfig struct {
	metav1.TypeMeta `json:",inline"`
	Sharing         *sharing `json:"sharing,omitempty"`
}

type vfioDeviceConfig struct {
	metav1.TypeMeta `json:",inline"`
	Iommu           *struct {
		BackendPolicy   string `json:"backendPolicy,omitempty"`
		EnableAPIDevice *bool  `json:"enableAPIDevice,omitempty"`
	} `json:"iommu,omitempty"`
}

type sharing struct {
	Strategy          string `json:"strategy,omitempty"`
	TimeSlicingConfig *struct {
		Interval string `json:"interval,omitempty"`
	} `json:"timeSlicingConfig,omitempty"`
	MPSConfig *struct {
		DefaultActiveThreadPercentage     *int           `json:"defaultActiveThreadPercentage,omitempty"`
		DefaultPinnedDeviceMemoryLimit    any            `json:"defaultPinnedDeviceMemoryLimit,omitempty"`
		DefaultPerDevicePinnedMemoryLimit map[string]any `json:"defaultPerDevicePinnedMemoryLimit,omitempty"`
		MultiUser                         *bool          `json:"multiUser,omitempty"`
	} `json:"mpsConfig,omitempty"`
}

// checkParameters refuses a result whose parameters cannot be honoured. As in NVIDIA's driver the last matching entry of
// the right kind wins (class entries come before claim entries); an entry of another kind is passed over if it is meant for
// all requests, and an error if it names this request. Unlike there, an entry that names a request also covers its
// subrequests (firstAvailable), as the API says.
func checkParameters(allocation *resourceapi.AllocationResult, driverName string, result resourceapi.DeviceRequestAllocationResult, whole bool) error {
	fitting, what := kindGPUConfig, "a whole GPU"
	if !whole {
		fitting, what = kindMIGDeviceConfig, "a partition"
	}
	var effective error
	for i, entry := range allocation.Devices.Config {
		if entry.Opaque == nil || entry.Opaque.Driver != driverName {
			continue
		}
		applies := len(resourceclaim.ConfigForResult(allocation.Devices.Config[i:i+1], result)) > 0
		if !applies {
			continue
		}
		path := fmt.Sprintf("config[%d].opaque.parameters", i)
		if entry.Source == resourceapi.AllocationConfigSourceClass {
			path = "the device class's " + path
		}
		kind, unsupported, err := decodeParameters(entry.Opaque.Parameters.Raw)
		switch {
		case err != nil:
			return fmt.Errorf("%s: %w", path, err)
		case kind == fitting:
			effective = nil
			if unsupported != nil {
				effective = fmt.Errorf("%s.%w", path, unsupported)
			}
		case len(entry.Requests) > 0:
			return fmt.Errorf("%s.kind: %s is for request %s, which got %s: only %s fits", path, kind, result.Request, what, fitting)
		}
	}
	return effective
}

// decodeParameters is strict: an unknown field is an error, because it would silently do nothing. unsupported names a field
// that is understood but has no effect in this version.
func decodeParameters(raw []byte) (kind string, unsupported, err error) {
	var meta metav1.TypeMeta
	if err := kjson.UnmarshalCaseSensitivePreserveInts(raw, &meta); err != nil {
		return "", nil, err
	}
	if meta.APIVersion != parametersAPIVersion {
		return "", nil, fmt.Errorf("apiVersion: %q is not known (want %q)", meta.APIVersion, parametersAPIVersion)
	}
	switch meta.Kind {
	case kindGPUConfig:
		var c gpuConfig
		if err := decodeStrict(raw, &c); err != nil {
			return "", nil, err
		}
		return meta.Kind, c.Sharing.unsupported(), nil
	case kindMIGDeviceConfig:
		var c migDeviceConfig
		if err := decodeStrict(raw, &c); err != nil {
			return "", nil, err
		}
		return meta.Kind, c.Sharing.unsupported(), nil
	case kindVFIODeviceConfig:
		return meta.Kind, nil, decodeStrict(raw, &vfioDeviceConfig{})
	default:
		return "", nil, fmt.Errorf("kind: %q is not known (want %s, %s or %s)", meta.Kind, kindGPUConfig, kindMIGDeviceConfig, kindVFIODeviceConfig)
	}
}

func decodeStrict(raw []byte, into any) error {
	strict, err := kjson.UnmarshalStrict(raw, into)
	if err != nil {
		return err
	}
	return errors.Join(strict...)
}

// unsupported names the first field that asks for something. Nothing set is the default: no sharing.
func (s *sharing) unsupported() error {
	switch {
	case s == nil:
		return nil
	case s.Strategy != "":
		return fmt.Errorf("sharing.strategy: %q is not supported: this version gives out devices whole", s.Strategy)
	case s.TimeSlicingConfig != nil:
		return errors.New("sharing.timeSlicingConfig: time-slicing is not supported: this version gives out devices whole")
	case s.MPSConfig != nil:
		return errors.New("sharing.mpsConfig: MPS is not supported: this version gives out devices whole")
	}
	return nil
}
