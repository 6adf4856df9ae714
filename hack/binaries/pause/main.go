// SPDX-License-Identifier: Apache-2.0

// Command pause waits until it is told to end, and meanwhile reaps every child it inherits. It is the first process of
// a pod sandbox and of each machine of the test cluster. It does nothing else.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for received := range signals {
		if received != syscall.SIGCHLD {
			return
		}
		// Several children may have ended behind one SIGCHLD.
		for {
			pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
			if pid <= 0 && err != syscall.EINTR {
				break
			}
		}
	}
}
