// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/dl"
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
)

func (o Options) openLibrary(l layout) (gonvml.Interface, error) {
	if o.OpenLibrary != nil {
		library, err := o.OpenLibrary()
		return &guard{Interface: library}, err
	}
	if err := bind(l.library); err != nil {
		return nil, err
	}
	return &guard{Interface: gonvml.New(gonvml.WithLibraryPath(l.library))}, nil
}

// fileIdentity distinguishes builds of a library, wherever it is mounted.
type fileIdentity struct {
	name  string
	size  int64
	mtime time.Time
}

func identify(path string) (fileIdentity, error) {
	info, err := os.Stat(path)
	if err != nil {
		return fileIdentity{}, err
	}
	return fileIdentity{name: filepath.Base(path), size: info.Size(), mtime: info.ModTime()}, nil
}

// bound is the library whose functions this process runs. It is a package variable because the dynamic linker binds once per
// process.
var bound struct {
	sync.Mutex
	to *fileIdentity
}

// bind checks a library before go-nvml opens it, and returns an error if this process can no longer use it.
func bind(path string) error {
	identity, err := identify(path)
	if err != nil {
		return &NoDriverError{Cause: err}
	}
	bound.Lock()
	defer bound.Unlock()
	if bound.to != nil {
		if *bound.to != identity {
			return ErrDriverReplaced
		}
		return nil
	}
	if err := checkSymbols(path); err != nil {
		return &NoDriverError{Cause: err}
	}
	bound.to = &identity
	return nil
}

// requiredSymbols are functions that every driver since R450 has; alternatives are later versions of one function. go-nvml calls
// nvmlErrorString to print an error.
var requiredSymbols = [][]string{
	{"nvmlInit_v2", "nvmlInit"},
	{"nvmlShutdown"},
	{"nvmlErrorString"},
	{"nvmlSystemGetDriverVersion"},
	{"nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"},
	{"nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex"},
	{"nvmlSystemGetCudaDriverVersion"},
	{"nvmlDeviceGetHandleByUUID"},
	{"nvmlDeviceGetUUID"},
	{"nvmlDeviceGetIndex"},
	{"nvmlDeviceGetMinorNumber"},
	{"nvmlDeviceGetName"},
	{"nvmlDeviceGetBrand"},
	{"nvmlDeviceGetCudaComputeCapability"},
	{"nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo"},
	{"nvmlDeviceGetMemoryInfo"},
	{"nvmlDeviceGetEccMode"},
	{"nvmlDeviceGetComputeMode"},
	{"nvmlDeviceSetComputeMode"},
	{"nvmlDeviceGetPersistenceMode"},
	{"nvmlDeviceGetNvLinkState"},
	{"nvmlDeviceGetNvLinkRemotePciInfo_v2", "nvmlDeviceGetNvLinkRemotePciInfo"},
	{"nvmlDeviceGetTopologyCommonAncestor"},
}

func checkSymbols(path string) (err error) {
	library := dl.New(path, dl.RTLD_LAZY|dl.RTLD_LOCAL)
	if err := library.Open(); err != nil {
		return fmt.Errorf("open library: %w", err)
	}
	defer func() { err = errors.Join(err, library.Close()) }()
	for _, names := range requiredSymbols {
		if !hasAny(library.Lookup, names) {
			return fmt.Errorf("%s lacks %s", path, names[0])
		}
	}
	return nil
}

func hasAny(lookup func(string) error, names []string) bool {
	for _, name := range names {
		if lookup(name) == nil {
			return true
		}
	}
	return false
}
