// SPDX-License-Identifier: Apache-2.0

// Command standin is the smallest program that needs of its image what the agent needs: it loads a shared library by
// path, looks up an account through the C library, and says its version.
package main

// #cgo LDFLAGS: -ldl
// #include <dlfcn.h>
// #include <stdlib.h>
import "C"

import (
	"fmt"
	"os"
	"os/user"
	"unsafe"

	"github.com/tandem-gpu/tandem/internal/version"
)

func main() {
	library := C.CString(os.Args[1])
	defer C.free(unsafe.Pointer(library))
	if C.dlopen(library, C.RTLD_LAZY) == nil {
		fmt.Println("dlopen:", C.GoString(C.dlerror()))
		os.Exit(1)
	}
	root, err := user.LookupId("0")
	if err != nil {
		fmt.Println("look up root:", err)
		os.Exit(1)
	}
	fmt.Println("standin", version.String(), root.Username)
}
